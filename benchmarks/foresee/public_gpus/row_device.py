"""The memory of a row's device: what programs can have, and what lies outside PyTorch."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from benchmarks.foresee.public_gpus.model_of_row import RowProgram
from zerotune.trial_lib.plan.device_memory import AllocatorSettings
from zerotune.trial_lib.plan.devices import DeviceFigures, known_devices
from zerotune.trial_lib.plan.fits import CONTEXT, CONTEXT_OF_ALL_KERNELS, GIB, outside_pytorch
from zerotune.trial_lib.search.budgets import Uncertain

# How the names of devices end that are not on a maker's own board.
_BOARDS = "pcie", "nvl"
# Visible bytes of a device whose kind no list has.
_VISIBLE = 0.985


@lru_cache
def _devices() -> dict[str, DeviceFigures]:
    return known_devices()


def device_of(row: Mapping[str, Any]) -> DeviceFigures | None:
    """Returns the known device that a row's `gpu_kind` names; None if it names none.

    Of several sizes the row's counts, or the nearest to it. If the row states none, the first that is listed.
    """
    words = row["gpu_kind"].lower()
    named = [each for name, each in _devices().items() if _is_named(name, words)]
    board = next((each for each in _BOARDS if re.search(rf"{each}\b", words)), "")
    found = [each for each in named if each.name.partition("b-")[2] == board] or named
    if not found:
        return None
    stated = re.search(r"(\d+) ?gi?b|-(\d+)\b", words)
    size = row.get("gpu_memory_gib") or (float(stated[1] or stated[2]) if stated else None)
    # Makers count gigabytes, of which torch sees fewer.
    return found[0] if size is None else min(found, key=lambda each: abs(each.memory / GIB - _VISIBLE * size))


def _is_named(name: str, words: str) -> bool:
    """Returns whether words have the kind of a device, such as `RTX 4090` that of `rtx4090-24gb`."""
    kind = name.partition("-")[0]
    letters = re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=[a-z])", "[ -]?", kind)
    return re.search(rf"(?<![a-z0-9]){letters}(?!(?!sxm|pcie|nvl)[a-z0-9])", words) is not None


def capacity(row: Mapping[str, Any]) -> float:
    """Returns the bytes of a row's device that programs can have; infinity if neither row nor device says."""
    if row.get("capacity_gib"):
        return float(row["capacity_gib"]) * GIB
    device, size = device_of(row), row.get("gpu_memory_gib")
    if device is not None and (size is None or f"-{size:g}gb" in device.name):
        return device.memory
    return float("inf") if size is None else _VISIBLE * float(size) * GIB


def capability(row: Mapping[str, Any]) -> float:
    """Returns the compute capability of a row's device; 8.0 if no list has it."""
    device = device_of(row)
    return 8.0 if device is None else device.capability


def allocator(row: Mapping[str, Any]) -> AllocatorSettings:
    """Returns the settings of PyTorch's allocator: those of torchtitan's `run_train.sh` there, else the defaults."""
    return AllocatorSettings(expandable_segments="torchtitan" in row["framework"].lower())


def outside(row: Mapping[str, Any], program: RowProgram) -> Uncertain:
    """Returns the bytes of a row's device that CUDA and NCCL take."""
    # Sources of the V100's years are older than CUDA 11.7.
    is_old = "v100" in row["gpu_kind"].lower()
    if program.world == 1 and "deepspeed" not in row["framework"].lower():
        # Others open no communicator for a single rank.
        return CONTEXT_OF_ALL_KERNELS if is_old else CONTEXT
    return outside_pytorch(program.world, program.per_node, loads_all_kernels=is_old)


def room(row: Mapping[str, Any], program: RowProgram) -> float:
    """Returns the bytes of a row's device that are left for PyTorch."""
    return capacity(row) - outside(row, program).mean
