"""Trains a small Llama whose layers DeepSpeed divides over ranks if the configuration asks for it.

The loader gives the ranks of one replica the same samples.
"""

import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY, SAMPLES = 64, 512, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.width,
        intermediate_size=512,
        num_hidden_layers=arguments.layers,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(args=arguments, model=model, optimizer=adam)
    data = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    replica = torch.distributed.get_rank(engine.data_parallel_group)
    sampler = DistributedSampler(data, num_replicas=engine.dp_world_size, rank=replica)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
    while engine.global_steps < arguments.steps:
        for tokens in loader:
            tokens = tokens.to(engine.device)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            if engine.global_steps == arguments.steps:
                break


if __name__ == "__main__":
    main()
