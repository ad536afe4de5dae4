"""Remembers what DeepSpeed asks of the processor whenever it loads an op. The answer takes 1.2 s, twice for each op.

Runs in the user's environment. py-cpuinfo counts the processor's ticks in a busy loop for a second. But DeepSpeed's
builder needs only the architecture and its flags (`cpu_arch` and `simd_width` of deepspeed/ops/op_builder/builder.py).
"""

import contextlib
import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_lib.wire.whole_files import write_whole

_ASKED_FOR = {"arch", "flags"}


def remember_cpu_info(file: Path | None = None) -> None:
    """Has py-cpuinfo look once until the next boot, for this process, its forks and later processes.

    Args:
        file: the file that keeps the answer. None is a file in the user's cache.
    """
    try:
        import cpuinfo
    except ImportError:
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's own raises where there is no home
    keep = file or Path(cache) / "zerotune" / "cpu.json"
    look: Callable[[], dict[str, Any]] = cpuinfo.get_cpu_info
    seen: dict[str, Any] = {}

    def remembered() -> dict[str, Any]:
        if not seen:
            seen.update(_kept(keep))
        if not seen:
            info = look()
            # If the process that looks is killed, it returns nothing.
            if not info.keys() >= _ASKED_FOR:
                return info
            seen.update(info)
            # The disk is full, or the home cannot be written. The next process looks for itself.
            with contextlib.suppress(OSError):
                keep.parent.mkdir(parents=True, exist_ok=True)
                write_whole(keep, json.dumps({"boot": _boot(), "seen": info}))
        return copy.deepcopy(seen)

    cpuinfo.get_cpu_info = remembered


def _kept(file: Path) -> dict[str, Any]:
    """Returns the kept answer of this boot. Empty if the file cannot be read or is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        seen = dict(kept["seen"])
        if kept["boot"] == _boot() and seen.keys() >= _ASKED_FOR:
            return seen
    return {}


def _boot() -> str:
    """Identifies this boot of this machine. Machines may share a home, and a processor may be replaced."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
