"""Devices: which one a rank has, and moving data to it."""

from collections.abc import Mapping
from typing import Any

import torch


def rank_device(local_rank: int) -> torch.device:
    """Returns the device of a rank, made the current one: its accelerator where there is one, else the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def move_to(device: torch.device, data: Any) -> Any:
    """Returns data on a device.

    Args:
        device: where to.
        data: a tensor, anything with a `to` of its own (a packed sequence, a tokenizer's output), or mappings, lists
            and tuples of those to any depth; what else there is stays as it is.
    """
    if isinstance(data, torch.Tensor):
        # From pinned memory it goes on beside the computation; the device's stream keeps the order.
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
