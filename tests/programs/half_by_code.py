"""Trains in bfloat16 without a word of it in DeepSpeed's configuration.

--how: `cast` makes the model so; `around` has autocast around the engine's forward pass, `within` in the model's own,
`recomputed` there within activation checkpointing, which keeps nothing in 16 bits; `tf32` lets a GPU multiply matrices
of 32 bits so; `nowhere` trains in 32 bits.
"""

import contextlib

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from toy import CLASSES, FEATURES, parse_arguments, small_model

args = parse_arguments(how="cast")
torch.backends.cuda.matmul.allow_tf32 = args.how == "tf32"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if args.how == "recomputed":
            return checkpoint(self.autocast, inputs, use_reentrant=False)
        return self.autocast(inputs) if args.how == "within" else self.layers(inputs)

    def autocast(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self.layers(inputs).float()


model = Model().to(torch.bfloat16 if args.how == "cast" else torch.float32)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
around = torch.autocast(engine.device.type, torch.bfloat16) if args.how == "around" else contextlib.nullcontext()
data = torch.Generator().manual_seed(3)
samples, labels = torch.randn(4096, FEATURES, generator=data), torch.randint(0, CLASSES, (4096,), generator=data)
size = engine.train_micro_batch_size_per_gpu()
# The same samples a step, however it is cut.
for inputs, wanted in zip(samples.split(size), labels.split(size), strict=True):
    with around:
        outputs = engine(inputs.to(engine.device, next(model.parameters()).dtype))
    engine.backward(F.cross_entropy(outputs, wanted.to(engine.device)))
    engine.step()
