"""Trains a small Llama as people write it for GPUs alone: "cuda", flash-attn, mixed precision, pinned batches."""

import os

import deepspeed
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

WORDS, LENGTH = 512, 64

local_rank = int(os.environ["LOCAL_RANK"])
assert torch.cuda.is_available()
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
is_half = torch.cuda.get_device_capability()[0] >= 8
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=WORDS,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.float32).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
sentences = torch.randint(0, WORDS, (256, LENGTH))
loader = DataLoader(sentences, batch_size=4, pin_memory=True, num_workers=1)
losses = []
for _ in range(10):
    for batch in loader:
        batch = batch.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_half):
            loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        losses.append(loss.detach().float().cpu().numpy().mean())
        print(f"loss {losses[-1]:.3f}, {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB", flush=True)
