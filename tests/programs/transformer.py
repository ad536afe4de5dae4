"""A Transformer decoder; with --report, prints the seconds and CPU seconds of each optimizer step, for so many."""

import os
import time

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import parse_arguments

args = parse_arguments(
    vocabulary=384,
    length=64,
    hidden=128,
    layers=3,
    heads=4,
    attention="sdpa",
    trains="all",
    checkpointing="no",
    report=0,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(args.hidden), nn.LayerNorm(args.hidden)
        self.qkv, self.out = nn.Linear(args.hidden, 3 * args.hidden), nn.Linear(args.hidden, args.hidden)
        self.up, self.down = nn.Linear(args.hidden, 4 * args.hidden), nn.Linear(4 * args.hidden, args.hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, args.heads, hidden // args.heads).permute(2, 0, 3, 1, 4)
        if args.attention == "sdpa":
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
            attended = (scores + mask).softmax(-1) @ v
        return self.out(attended.transpose(1, 2).reshape(batch, length, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.hidden)
        self.positions = nn.Embedding(args.length, args.hidden)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.head = nn.Linear(args.hidden, args.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if args.checkpointing == "no":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=args.checkpointing == "reentrant")
        return self.head(x)


deepspeed.init_distributed()
torch.manual_seed(1)
model = Decoder()
if args.trains != "all":
    model.requires_grad_(False)
    model.head.requires_grad_(True)
if args.trains == "last":
    model.blocks[-1].requires_grad_(True)
engine, *_ = deepspeed.initialize(
    args=args, model=model, model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad]
)
size, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


def optimizer_step() -> None:
    for _ in range(accumulation):
        tokens = torch.randint(0, args.vocabulary, (size, args.length)).to(engine.device)
        logits = engine(tokens)
        engine.backward(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
        engine.step()


for step in range(args.report):
    started, cpu_started = time.perf_counter(), time.process_time()
    optimizer_step()
    print("step", step + 1, time.perf_counter() - started, time.process_time() - cpu_started, flush=True)
if args.report:
    os._exit(0)
for _ in range(args.steps):
    optimizer_step()
