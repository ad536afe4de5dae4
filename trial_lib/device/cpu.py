"""A host that trains on its processor: a slot is a core."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from zerotune.trial_lib.device.base import Host, HostKind, host_memory
from zerotune.trial_lib.messages.errors import InputError

_HOST_RESERVE = 0.1


class CpuHost(HostKind):
    device = "cpu"
    resource = "CPU"
    word = "cpu"
    visible_by: str | None = None
    ranks_option = "--num_accelerators"
    compiler: str | None = None
    computes_on_the_processor = True

    def cores(self, slot: str) -> list[int]:
        return [int(slot)] if slot.isdecimal() else []

    def budget(self, host: Host, asked: int | None) -> int | None:
        return host.memory_per_slot if asked is None else asked


def cores_of_this_process() -> Host:
    """Returns the cores in this process's affinity, and their share of the memory."""
    cores = sorted(os.sched_getaffinity(0))
    memory = int(host_memory() * (1 - _HOST_RESERVE)) // len(cores)
    return Host("cpu", [str(core) for core in cores], memory)


# Accelerators that ZeroTune does not tune on. A host with one is refused, and not treated as one without.

_DEV, _ACCEL = Path("/dev"), Path("/sys/class/accel")
DEEPSPEEDS_CHOICE = "DS_ACCELERATOR"
"""The variable that chooses DeepSpeed's accelerator (accelerator/real_accelerator.py)."""

_TUNED_ON = "ZeroTune tunes on NVIDIA's and AMD's GPUs and on processors"


def refuse_others(variables: Mapping[str, str]) -> None:
    """Refuses a host without GPUs to tune on but with other accelerators, if torch can train on these."""
    choice = variables.get(DEEPSPEEDS_CHOICE)
    if choice not in (None, "", "cpu", "cuda"):
        raise InputError(
            f"{DEEPSPEEDS_CHOICE} is {choice}, and {_TUNED_ON}.",
            where="the environment",
            remedy=f"Unset it, or set {DEEPSPEEDS_CHOICE}=cpu to tune on the processor.",
        )
    for name, sign_of in _OTHERS:
        sign = sign_of()
        if sign is None:
            continue
        raise InputError(
            f"this host has {name} ({sign}), and {_TUNED_ON}.",
            where="the devices",
            remedy=f"Tune on a host that has one, or set {DEEPSPEEDS_CHOICE}=cpu to tune on this one's processor.",
        )


def chooses_processor(variables: Mapping[str, str]) -> bool:
    """Returns whether an environment makes DeepSpeed train on the processor, whatever else there is."""
    return variables.get(DEEPSPEEDS_CHOICE) == "cpu"


def _device_file(pattern: str) -> Callable[[], str | None]:
    def sign() -> str | None:
        return next((str(path) for path in sorted(_DEV.glob(pattern))), None)

    return sign


def _gaudi() -> str | None:
    # A device file: the driver's own, or the kernel's for accelerators, which other drivers share.
    for device in _ACCEL.glob("accel[0-9]*"):
        if (device / "device" / "driver").resolve().name == "habanalabs":
            return str(_DEV / "accel" / device.name)
    return _device_file("hl[0-9]*")()


def _intel() -> str | None:
    # A device if torch can train on it. Nearly every processor has graphics, which do not count.
    with contextlib.suppress(metadata.PackageNotFoundError):
        is_for_xpu = "xpu" in metadata.version("torch") or importlib.util.find_spec("intel_extension_for_pytorch")
        return _device_file("dri/renderD*")() if is_for_xpu else None
    return None


# Each with a function that returns the sign that a process here may use one; None if there is none.
_OTHERS: tuple[tuple[str, Callable[[], str | None]], ...] = (
    ("an Intel GPU", _intel),
    ("an Ascend NPU", _device_file("davinci[0-9]*")),
    ("a Gaudi accelerator", _gaudi),
    ("a Cambricon MLU", _device_file("cambricon_dev[0-9]*")),
    ("a Trainium or Inferentia accelerator", _device_file("neuron[0-9]*")),
)
