"""Whether a rank trains on the kind of device of its slot. The driver has asked NVML, and DeepSpeed asks torch.

The two differ if torch is built for another device, or if a container shows a GPU only to one of them. Then slots,
memory, arms and the answer would be of a device that no rank trains on.
"""

import os
import sys
from dataclasses import dataclass

from trial_lib.wire.errors import InputError

_ON_CORES = "set CUDA_VISIBLE_DEVICES= (to nothing) to tune on this host's cores."


class OtherDeviceError(InputError):
    """The rank trains on another kind of device than its slot."""


@dataclass
class _Expected:
    kind: str | None = None


_expected = _Expected()


def expect(kind: str | None) -> None:
    """Sets the kind of slots that `require` compares with: `cuda`, `cpu`, or None for any."""
    _expected.kind = kind


def found() -> str:
    """Returns PyTorch's name for the kind of device that DeepSpeed trains on here. AMD's GPUs are `cuda` too."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def require() -> None:
    """Compares the device with the slot. Call it when DeepSpeed is imported, before an engine is built.

    Raises:
        OtherDeviceError: they are of two kinds.
    """
    kind = found() if _expected.kind is not None else None
    if kind == _expected.kind:
        return
    assert kind is not None
    raise _on_cores_of(kind) if _expected.kind == "cpu" else _without_gpu(kind)


def _without_gpu(kind: str) -> OtherDeviceError:
    """Returns the message for slots that are GPUs."""
    import torch

    ranks = "the CPU" if kind == "cpu" else f"`{kind}`"
    what = f"the program's DeepSpeed trains on {ranks}, but this host's slots are GPUs"
    choice = os.environ.get("DS_ACCELERATOR")
    if choice:
        return OtherDeviceError(
            f"{what}: DS_ACCELERATOR={choice} chooses that.",
            where="the environment",
            remedy=f"Unset it, or leave it and {_ON_CORES}",
        )
    built_for = _gpus_of_torch()
    if built_for is None:
        return OtherDeviceError(
            f"{what}: torch {torch.__version__} is built without CUDA.",
            where=sys.executable,
            remedy=f"Install a torch for your GPUs there (https://pytorch.org), or {_ON_CORES}",
        )
    return OtherDeviceError(
        f"{what}: torch {torch.__version__}, built for {built_for}, finds none that it can use.",
        where=sys.executable,
        remedy='Check with `python -c "import torch; torch.cuda.init()"` there. Usually the driver is too old. '
        f"Or {_ON_CORES}",
    )


def _gpus_of_torch() -> str | None:
    """Returns the GPUs that torch is built for, such as `CUDA 13.0`; None for a CPU alone."""
    import torch

    hip = getattr(torch.version, "hip", None)
    return f"ROCm {hip}" if hip else None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _on_cores_of(kind: str) -> OtherDeviceError:
    """Returns the message for slots that are cores."""
    what = f"the program's DeepSpeed trains on `{kind}`, but this host's slots are its cores"
    if kind != "cuda":
        return OtherDeviceError(
            f"{what}. ZeroTune does not tune on that kind.",
            where="the devices",
            remedy="Set DS_ACCELERATOR=cpu to tune on this host's cores.",
        )
    if (_gpus_of_torch() or "").startswith("ROCm"):
        return OtherDeviceError(
            f"{what}: the kernel shows ZeroTune no AMD GPU.",
            where="/sys/class/kfd",
            remedy=f"If this is a container, start it with --device=/dev/kfd --device=/dev/dri. Or {_ON_CORES}",
        )
    return OtherDeviceError(
        f"{what}: NVML shows ZeroTune no NVIDIA GPU.",
        where="the NVIDIA driver",
        remedy="If this is a container, start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility, so that it has NVML. "
        f"Check with `nvidia-smi`. Or {_ON_CORES}",
    )
