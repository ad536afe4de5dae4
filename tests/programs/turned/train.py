"""Trains a small Llama by a loop of its own, and prints what a reader of the log cannot see otherwise.

Each step prints the graphs that were compiled in it, the model's attention, the calls of torch's fused one, the layers
that recompute, and the loss. --itself: the program does `checkpoint` or `compile` by itself. --recompute: it has
Hugging Face's own method recompute its layers.
"""

import argparse
import sys

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 128, 32

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--itself", default="")
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--steps", type=int, default=300)
args = deepspeed.add_config_arguments(parser).parse_args()

calls = 0
# torch's own, also if this process runs the program again.
fused = getattr(F.scaled_dot_product_attention, "of_torch", F.scaled_dot_product_attention)


def counted(*inputs, **settings):  # type: ignore[no-untyped-def]
    global calls
    calls += not torch.compiler.is_compiling()
    return fused(*inputs, **settings)


counted.of_torch = fused  # type: ignore[attr-defined]
F.scaled_dot_product_attention = counted


class Classifier(torch.nn.Module):
    """No model of Hugging Face's, which recomputes its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(args.layers))
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False).relu()
        return torch.as_tensor(self.head(x))


def graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    num_key_value_heads=4,
    attention_dropout=args.dropout,
    use_cache=False,
)
model = Classifier() if args.itself == "checkpoint" else LlamaForCausalLM(config)
if args.recompute:
    model.gradient_checkpointing_enable()
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if args.itself == "compile":
    engine.compile(backend="aot_eager")
draws = torch.Generator().manual_seed(7)
# A process that runs this again has counted before.
before = graphs()
for step in range(args.steps):
    tokens = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), LENGTH), generator=draws)
    tokens = tokens.to(engine.device)
    calls = 0
    output = engine(tokens)
    logits = output if args.itself == "checkpoint" else output.logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()
    recomputed = sum(bool(getattr(each, "gradient_checkpointing", False)) for each in model.modules()) - bool(
        getattr(getattr(model, "model", None), "gradient_checkpointing", False)
    )
    now = graphs()
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    made = f"graphs {max(0, now - before)} attention {attention} fused {calls} recomputed {recomputed}"
    print(f"step {step + 1} {made} loss {loss.item():.6f}", flush=True)
    before = now
