"""A training of a few thousand parameters that keeps 256 KiB a sample: a step takes milliseconds."""

import argparse
import os
import time

import deepspeed
import deepspeed.comm as dist
import torch
import torch.nn.functional as F

FEATURES, CLASSES, COPIES = 32, 8, 1024


class Widen(torch.nn.Module):
    """Scales its input in a thousand ways and averages them: memory without arithmetic, so that few samples fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.rand(COPIES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.unsqueeze(-1) * self.scales).mean(-1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_steps", type=int, default=40, help="optimizer steps of the whole training")
    parser.add_argument("--start_seconds", type=float, default=0.0, help="how long it sleeps before the first step")
    parser.add_argument(
        "--layers", type=int, default=1, help="more save more for the backward pass than it takes itself"
    )
    parser.add_argument("--step_seconds", type=float, default=0.0, help="how long a step sleeps")
    parser.add_argument("--largest_micro_batch", type=int, default=10**9, help="a larger one is out of memory")
    parser.add_argument("--fail_above", type=int, default=10**9, help="a larger micro-batch fails by a bug")
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args()


def refuse(micro_batch: int, args: argparse.Namespace) -> None:
    """Fails as asked, before there is an engine or after."""
    if micro_batch > args.fail_above:
        raise ValueError(f"a bug in the user's code, at micro-batch {micro_batch}")
    if micro_batch > args.largest_micro_batch:
        raise MemoryError(f"no room for a micro-batch of {micro_batch}")


def main() -> None:
    args = parse_arguments()
    print(f"pid {os.getpid()} cores {sorted(os.sched_getaffinity(0))} at {time.time()}", flush=True)
    torch.manual_seed(1)
    wide = [Widen() for _ in range(args.layers)]
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), *wide, torch.nn.Linear(64, CLASSES))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    micro_batch = engine.train_micro_batch_size_per_gpu()
    time.sleep(args.start_seconds)
    for _ in range(args.num_steps):
        inputs, labels = torch.randn(micro_batch, FEATURES), torch.randint(0, CLASSES, (micro_batch,))
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        refuse(micro_batch, args)
        engine.backward(F.cross_entropy(engine(inputs), labels))
        engine.step()
        time.sleep(args.step_seconds)
    print(f"trained {args.num_steps} steps at micro-batch {micro_batch}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
