"""The device of a rank, its process group, and moving data to it."""

import os
from collections.abc import Mapping
from typing import Any

import torch

# Determined's name, and ZeroTune's own.
_MANUAL_INIT = ("DET_MANUAL_INIT_DISTRIBUTED", "ZEROTUNE_MANUAL_INIT_DISTRIBUTED")


def rank_device(local_rank: int) -> torch.device:
    """Returns the device of a rank and makes it the current one: its accelerator if it has one, else the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def join_process_group(device: torch.device) -> None:
    """Initialises the process group for a rank's device, unless the trial does."""
    if any(os.environ.get(name, "0").lower() not in ("", "0", "false") for name in _MANUAL_INIT):
        return
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else None)


def move_to(device: torch.device, data: Any) -> Any:
    """Returns data on a device.

    Args:
        device: the device.
        data: a tensor, an object with its own `to` (a packed sequence, a tokenizer's output), or mappings, lists and
            tuples of those to any depth. Other values stay unchanged.
    """
    if isinstance(data, torch.Tensor):
        # A copy from pinned memory runs beside the computation. The device's stream keeps the order.
        return data.to(device, non_blocking=device.type != "cpu")
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        moved = {key: move_to(device, value) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move_to(device, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(move_to(device, value) for value in data)
    return data
