"""The kernel's information on this host's AMD GPUs. It needs none of AMD's libraries.

Sources: the kernel's `kfd_topology.c` for the files, ROCm's documentation of GPU isolation for names and variables.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from trial_lib.device.host.nvml import Gpu

ROCM_VARIABLE, HIP_VARIABLE = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""ROCm's runtime reads the first, leaves out devices and renumbers the others. HIP does the same with the second."""

_DEV, _NODES = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE: the device's own memory.
_OWN_MEMORY = (1, 2)


def is_driver_there() -> bool:
    """Returns whether this host has the driver that ROCm needs."""
    return (_DEV / "kfd").exists()


def amd_gpus(variables: Mapping[str, str]) -> list[Gpu]:
    """Returns the GPUs that a process may open, in HIP's order; none without a driver.

    Graphics in a processor are not GPUs to tune on.

    Args:
        variables: the environment of the process that will use them.
    """
    if not is_driver_there():
        return []
    nodes = sorted((path for path in _NODES.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    found = [gpu for gpu in map(_gpu, nodes) if gpu is not None]
    shown = variables.get(ROCM_VARIABLE)
    return found if shown is None else _shown(shown, found)


def _shown(variable: str, gpus: list[Gpu]) -> list[Gpu]:
    """Returns the devices that a list of indices and UUIDs names, up to the first unknown name."""
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
    """Returns the GPU of a node of the topology; None for a processor, or for a GPU that this process may not open."""
    has = _numbers(node / "properties")
    if not has.get("simd_count") or has.get("cpu_cores_count"):
        return None
    render = f"renderD{has.get('drm_render_minor', 0)}"
    if not os.access(_DEV / "dri" / render, os.R_OK | os.W_OK):
        return None
    banks = [_numbers(bank) for bank in node.glob("mem_banks/*/properties")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _OWN_MEMORY)
    # Cards from before 2018 have no unique number.
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
