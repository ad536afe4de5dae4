"""The memory of a row's device: what programs can have, and what lies outside PyTorch."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from benchmarks.foresee.public_gpus.model_of_row import RowProgram
from trial_lib.foresee.memory.allocator_settings import AllocatorSettings
from trial_lib.foresee.memory.constants import GIB, outside_pytorch
from trial_lib.foresee.time.devices import known_devices
from trial_lib.memory.budget import Uncertain

_CAPABILITIES = (("v100", (7, 0)), ("t4", (7, 5)), ("h100", (9, 0)), ("h200", (9, 0)), ("b200", (10, 0)))
# Visible bytes of a device whose kind no list has.
_VISIBLE = 0.985


@lru_cache
def _devices() -> dict[str, float]:
    return {name: figures.memory / GIB for name, figures in known_devices().items()}


def capacity(row: Mapping[str, Any]) -> float:
    """Returns the bytes of a row's device that programs can have."""
    if row.get("capacity_gib"):
        return float(row["capacity_gib"]) * GIB
    words, size = row["gpu_kind"].lower(), row["gpu_memory_gib"]
    for name, visible in _devices().items():
        kind, _, rest = name.partition("-")
        if kind in words and re.match(rf"{size:g}gb", rest):
            return visible * GIB
    return _VISIBLE * float(size) * GIB


def capability(row: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the compute capability of a row's device."""
    words = row["gpu_kind"].lower()
    return next((found for name, found in _CAPABILITIES if name in words), (8, 0))


def allocator(row: Mapping[str, Any]) -> AllocatorSettings:
    """Returns the settings of PyTorch's allocator: those of torchtitan's `run_train.sh` there, else the defaults."""
    return AllocatorSettings(expandable_segments="torchtitan" in row["framework"].lower())


def outside(row: Mapping[str, Any], program: RowProgram) -> Uncertain:
    """Returns the bytes of a row's device that CUDA and NCCL take."""
    # Sources of the V100's years are older than CUDA 11.7.
    is_old = "v100" in row["gpu_kind"].lower()
    return outside_pytorch(program.world, program.per_node, loads_all_kernels=is_old)


def room(row: Mapping[str, Any], program: RowProgram) -> float:
    """Returns the bytes of a row's device that are left for PyTorch."""
    return capacity(row) - outside(row, program).mean
