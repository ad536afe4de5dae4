"""What the kernel says of this host's AMD GPUs. No library of theirs is needed for it.

Sources: the kernel's `kfd_topology.c` for the files, ROCm's documentation of GPU isolation for names and variables.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from trial_lib.device.host.nvml import Gpu

ROCM_VARIABLE, HIP_VARIABLE = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""By the first ROCm's runtime leaves out devices and counts the others anew; by the second HIP does so once more."""

_DEV, _NODES = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE: the device's own memory.
_OWN_MEMORY = (1, 2)


def is_driver_there() -> bool:
    """Returns whether this host has the driver that ROCm needs."""
    return (_DEV / "kfd").exists()


def amd_gpus(variables: Mapping[str, str]) -> list[Gpu]:
    """Returns the GPUs that a process may open, in the order in which HIP counts them; none where there is no driver.

    Graphics that are a part of a processor are no GPU to tune on.

    Args:
        variables: the environment of who will use them.
    """
    if not is_driver_there():
        return []
    nodes = sorted((path for path in _NODES.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    found = [gpu for gpu in map(_gpu, nodes) if gpu is not None]
    shown = variables.get(ROCM_VARIABLE)
    return found if shown is None else _shown(shown, found)


def _shown(variable: str, gpus: list[Gpu]) -> list[Gpu]:
    """Returns the devices that a list of indices and UUIDs names, up to the first name of none."""
    shown: list[Gpu] = []
    for name in map(str.strip, variable.split(",")):
        if name.isdecimal():
            named = gpus[int(name) : int(name) + 1]
        else:
            named = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(named) != 1 or named[0] in shown:
            break
        shown += named
    return shown


def _gpu(node: Path) -> Gpu | None:
    """Returns the GPU of a node of the topology; None for a processor, and for what this process may not open."""
    has = _numbers(node / "properties")
    if not has.get("simd_count") or has.get("cpu_cores_count"):
        return None
    render = f"renderD{has.get('drm_render_minor', 0)}"
    if not os.access(_DEV / "dri" / render, os.R_OK | os.W_OK):
        return None
    banks = [_numbers(bank) for bank in node.glob("mem_banks/*/properties")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OWN_MEMORY)
    # Cards of before 2018 have no number of their own.
    place = f"{has.get('domain', 0):04x}:{has.get('location_id', 0):04x}"
    uuid = f"GPU-{has['unique_id']:016x}" if has.get("unique_id") else f"AMD-{place}"
    return Gpu(uuid=uuid, model=_model(node, render), memory=memory or None)


def _model(node: Path, render: str) -> str:
    for path in (Path("/sys/class/drm") / render / "device" / "product_name", node / "name"):
        with contextlib.suppress(OSError):
            if name := path.read_text().strip():
                return name
    return ""


def _numbers(properties: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        words = properties.read_text().split()
        return dict(zip(words[::2], map(int, words[1::2]), strict=False))
    return {}
