"""Tries whether torch can compute on each GPU, and on two together. Runs in the user's environment.

It runs in processes of its own, because a broken driver may end or block them. torch's own answer does not suffice. It
may come from NVML, which lists GPUs that the driver is too old for.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_lib.launch.processes import bootstrap

_SIDE = 64
_TOGETHER = 2
_TOGETHER_S = 30.0
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_REDUCES = "reduces"


def tried() -> dict[str, Any]:
    """Tries all devices.

    Returns:
        `sees` is the number of GPUs that torch sees, and `why_none` CUDA's reason if there is none. `devices` has the
        error of each device, empty if it computed. `together` is the error of a sum over the first two devices, None
        without two working devices.
    """
    # torch reads this variable at each call. With it torch would ask NVML instead of CUDA.
    os.environ.pop(_BY_NVML, None)
    import torch

    sees = torch.cuda.device_count()
    devices = [_words(functools.partial(compute, f"cuda:{number}")) for number in range(sees)]
    both_work = sees >= _TOGETHER and not any(devices[:_TOGETHER])
    return {
        "sees": sees,
        "why_none": "" if sees else _words(torch.cuda.init),
        "devices": devices,
        "together": reduced_together("cuda") if both_work else None,
    }


def compute(device: str) -> None:
    """Allocates memory on a device, and multiplies two matrices there.

    Raises:
        RuntimeError: that fails, or the product is wrong.
    """
    import torch

    ones = torch.ones(_SIDE, _SIDE, device=device)
    total = float((ones @ ones).sum())
    if total != _SIDE**3:
        raise RuntimeError(f"the elements of a product of matrices have the sum {total}, and it is {_SIDE**3}")


def reduced_together(kind: str) -> str:
    """The error of two processes that sum over two devices, by NCCL (`cuda`) or gloo (`cpu`); empty for none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        processes = []
        for rank in range(_TOGETHER):
            command = bootstrap.command(sys.executable, __name__, _REDUCES, kind, folder, str(rank))
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            processes.append(ended.enter_context(process))
            ended.callback(process.kill)
        said, deadline = [], time.monotonic() + _TOGETHER_S
        for process in processes:
            try:
                _, words = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said.append(f"it has not ended within {_TOGETHER_S:.0f} s")
                continue
            if process.returncode:
                # The first error comes first. The other process may only report that its peer is gone.
                said.insert(0, (words.strip().splitlines() or [f"a process ended with {process.returncode}"])[-1])
    return next(iter(said), "")


def _reduce(kind: str, folder: str, rank: int) -> None:
    import torch
    from torch import distributed

    is_cuda = kind == "cuda"
    device = torch.device(kind, rank) if is_cuda else torch.device(kind)
    if is_cuda:
        torch.cuda.set_device(device)
    store = f"file://{Path(folder) / 'store'}"
    distributed.init_process_group("nccl" if is_cuda else "gloo", init_method=store, rank=rank, world_size=_TOGETHER)
    share = torch.full((1,), rank + 1.0, device=device)
    distributed.all_reduce(share)
    if float(share) != sum(range(1, _TOGETHER + 1)):
        raise RuntimeError(f"the sum over two devices is {float(share)}")
    distributed.destroy_process_group()


def _words(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - told
        return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return ""


def main(arguments: list[str]) -> None:
    """Writes the result to a file descriptor, or runs one of the two processes of a sum."""
    if arguments[0] == _REDUCES:
        _, kind, folder, rank = arguments
        _reduce(kind, folder, int(rank))
        return
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(tried()))
