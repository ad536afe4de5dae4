"""The device of a rank."""

import os

import torch

from trial_lib.device.rank.base import Device
from trial_lib.device.rank.cpu import CpuDevice
from trial_lib.device.rank.cuda import CudaDevice


class UnknownDeviceError(Exception):
    """A rank trains on a kind of device that ZeroTune cannot measure."""


def device_of(device: torch.device) -> Device:
    """Returns the implementation for a device.

    Args:
        device: of an engine.

    Raises:
        UnknownDeviceError: it is neither a CPU nor one that PyTorch calls `cuda`, as it does NVIDIA's and AMD's.
    """
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(torch.cuda.current_device() if device.index is None else device.index)
    raise UnknownDeviceError(
        f"The program trains on `{device.type}`, which ZeroTune does not measure: it knows the GPUs that PyTorch calls "
        "`cuda` (NVIDIA's and AMD's) and CPUs. Set DS_ACCELERATOR=cpu to tune on this host's CPU."
    )


def device_in_use() -> Device:
    """Returns the GPU that this process has opened, or the CPU. It opens nothing."""
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_initialized() else CpuDevice()


def device_to_come() -> Device:
    """Returns the device that a rank without an engine will have, as DeepSpeed chooses it.

    Raises:
        UnknownDeviceError: see `device_of`.
    """
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    if kind != "cuda":
        return device_of(torch.device(kind))
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    return CudaDevice(local_rank if local_rank < count else torch.cuda.current_device())
