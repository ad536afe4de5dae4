"""A small Llama under Ulysses. An option gives the ranks that share the tokens of a sample."""

import argparse

import deepspeed
import torch
import torch.distributed.nn.functional as collective
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SAMPLES = 64, 64

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--sequence-ranks", type=int, default=1)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--length", type=int, default=16)
parser.add_argument("--micro-batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=1000)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
torch.manual_seed(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8 * args.heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        attn_implementation="sdpa",
    )
)
sequence = UlyssesSPAttentionHF.register_with_transformers(
    model_name_or_path=model,
    core_attn_implementation="sdpa",
    sequence_parallel_size=args.sequence_ranks,
    micro_batch_size=args.micro_batch,
)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), mpu=sequence)
tokens = torch.randint(0, VOCABULARY, (SAMPLES, args.length), generator=torch.Generator().manual_seed(3))
data = [{"input_ids": row, "labels": row.clone(), "position_ids": torch.arange(args.length)} for row in tokens]
loader = DataLoader(data, batch_size=args.micro_batch, sampler=DistributedSampler(data, shuffle=False), drop_last=True)
if sequence is not None:
    loader = UlyssesSPDataLoaderAdapter(
        loader,
        sp_rank=sequence.get_sequence_parallel_rank(),
        sp_group=sequence.get_sequence_parallel_group(),
        sp_world_size=args.sequence_ranks,
        device=engine.device,
    )
while engine.global_steps < args.steps:
    for batch in loader:
        batch = {key: value.to(engine.device) for key, value in batch.items()}
        outputs = engine(**batch)
        loss = outputs.loss
        if sequence is not None:
            labels, group = batch["shift_labels"].contiguous(), sequence.get_sequence_parallel_group()
            loss = model.loss_function(outputs.logits, None, vocab_size=VOCABULARY, shift_labels=labels)
            counted = (labels != -100).sum()
            parts = collective.all_gather(torch.stack([loss * counted, counted.to(loss.dtype)]), group=group)
            loss = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        engine.backward(loss)
        engine.step()
