"""Trains the model of this folder with DeepSpeed on random tokens, as its user would: without a word of ZeroTune.

It can be made to run out of memory at a place of one's choice, and says what it sees of the device.
"""

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
from llama import BACKENDS, Llama, Shape
from torch import nn

WARM_UP = 10
PLACES = ("forward", "backward", "update", "initialize", "pinned", "host")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in Shape.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--attention", choices=["sdpa", "eager", "flex", "flash_attn", *BACKENDS], default="sdpa")
    parser.add_argument("--compile", choices=["no", "model", "fullgraph", "module", "engine"], default="no")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--backward", choices=["engine", "scale", "loss"], default="engine")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 in the code, whatever the configuration says")
    parser.add_argument("--dtype", default="", help="of the parameters, where the code makes them so")
    parser.add_argument("--made_on", default="", help="where the model is made; by default on the device")
    parser.add_argument("--varies", action="store_true", help="sequences of many lengths")
    parser.add_argument("--out_of", choices=PLACES, help="where to ask for more memory than there is")
    parser.add_argument("--bytes", type=int, default=0, help="how much of it")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which to end")
    parser.add_argument("--report", type=Path, help="where to write what the steps took")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


class Taking(torch.autograd.Function):
    """Asks for memory in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        context.size, context.device = size, tensor.device
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + take(context.size, context.device).sum(), None


def take(size: int, device: torch.device) -> torch.Tensor:
    """Asks for so many bytes, and writes to them."""
    return torch.ones(size // 4, device=device)


def take_pinned(size: int) -> torch.Tensor:
    """Asks for so many bytes of locked memory, of which this process may have half as many more than it has."""
    own = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (own + size // 2, resource.RLIM_INFINITY))
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def take_of_the_host(size: int) -> torch.Tensor:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, resource.RLIM_INFINITY))
    return torch.ones(size // 4)


class Hungry(nn.Module):
    """A model that asks for memory where it is told to."""

    def __init__(self, model: nn.Module, place: str, size: int) -> None:
        super().__init__()
        self.model, self._place, self._size = model, place, size

    def _apply(self, *arguments: Any, **named: Any) -> nn.Module:
        moved = super()._apply(*arguments, **named)
        if self._place == "initialize":
            # DeepSpeed is moving the parameters, and what else it takes comes on top.
            take(self._size, next(self.parameters()).device)
        return moved

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._place == "forward":
            return self.model(tokens) + 0.0 * take(self._size, tokens.device)[0]
        if self._place == "pinned":
            take_pinned(self._size)
        if self._place == "host":
            take_of_the_host(self._size)
        loss = self.model(tokens)
        return Taking.apply(loss, self._size) if self._place == "backward" else loss


def batches(args: argparse.Namespace, size: int) -> Iterator[torch.Tensor]:
    tokens = torch.Generator().manual_seed(1 + int(os.environ.get("RANK", "0")))
    lengths = (args.length, args.length // 2, 3 * args.length // 4, args.length // 4) if args.varies else (args.length,)
    while True:
        for length in lengths:
            yield torch.randint(0, args.vocabulary, (size, length), generator=tokens)


def build(args: argparse.Namespace) -> Any:
    """Returns the engine."""
    torch.manual_seed(1)
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    # A processor takes 20 seconds to fill a billion parameters.
    with torch.device(args.made_on or ("cuda" if torch.cuda.is_available() else "cpu")):
        model: nn.Module = Llama(shape, args.attention)
    if args.dtype:
        model = model.to(getattr(torch, args.dtype))
    if args.out_of:
        model = Hungry(model, args.out_of, args.bytes)
    if args.compile in ("model", "fullgraph"):
        model = torch.compile(model, backend=args.backend, fullgraph=args.compile == "fullgraph")
    if args.compile == "module":
        model.compile(backend=args.backend)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.compile == "engine":
        engine.compile(backend=args.backend)
    if args.out_of == "update":
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        optimizer.register_step_pre_hook(lambda *_: take(args.bytes, engine.device) and None)
    return engine


def train_micro_batch(args: argparse.Namespace, engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    autocast = torch.autocast(engine.device.type, torch.bfloat16) if args.autocast else contextlib.nullcontext()
    with autocast:
        loss = engine(tokens.to(engine.device, non_blocking=True))
    if args.backward == "engine":
        engine.backward(loss)
    elif args.backward == "scale":
        engine.scale(loss).backward()
    else:
        loss.backward()
    engine.step()
    return loss.detach()


def say(what: str, **figures: Any) -> None:
    print(f"{what}: {json.dumps(figures)}", flush=True)


def tell_device(engine: Any, when: str) -> None:
    """Says what a GPU's memory has, beside what torch knows of it; nothing on a processor."""
    if engine.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info()
    held = {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    say("device", when=when, free=free, total=total, shown=shown(), **held)


def shown() -> int | None:
    """Returns the bytes that `nvidia-smi` shows for this process; None if it shows none."""
    with contextlib.suppress(Exception):  # no package, no driver, or a container that hides processes
        import pynvml

        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(number)):
                if process.pid == os.getpid():
                    return int(process.usedGpuMemory)
    return None


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def main() -> None:
    args = parse_arguments()
    if torch.cuda.is_initialized():
        # A program that is run again in the same process sees what its last run has left.
        say("at the start", free=torch.cuda.mem_get_info()[0], allocated=torch.cuda.memory_allocated())
    engine = build(args)
    tell_device(engine, "initialised")
    wait = torch.cuda.synchronize if engine.device.type == "cuda" else lambda: None
    data, accumulation = batches(args, engine.train_micro_batch_size_per_gpu()), engine.gradient_accumulation_steps()
    losses, ends = [], []
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        mean = torch.zeros((), device=engine.device)
        for _ in range(accumulation):
            mean += train_micro_batch(args, engine, next(data)) / accumulation
        losses.append(mean)
        if step == WARM_UP:
            # Nothing else waits for the device: what is timed is a training.
            wait()
            started = time.perf_counter()
        ends.append(time.perf_counter())
        if step in (3, 10):
            tell_device(engine, f"step {step}")
            if args.compile != "no" or args.attention == "flex":
                say("compiled", step=step, graphs=graphs())
        if ends[-1] - ends[0] > args.seconds:
            break
    wait()
    seconds, counted = time.perf_counter() - started, len(ends) - WARM_UP
    if args.report:
        figures = {
            "seconds_per_step": seconds / counted if counted > 0 else None,
            "steps": counted,
            "ends": [end - ends[0] for end in ends],
            "losses": [float(loss) for loss in losses[:20]],
            "samples_per_step": engine.train_batch_size(),
        }
        args.report.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
