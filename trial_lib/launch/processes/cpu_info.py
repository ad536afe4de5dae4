"""What DeepSpeed asks of the processor each time that it loads an op, remembered: it takes 1.2 s, twice for each op.

Runs in the user's environment. py-cpuinfo counts the processor's ticks for a second, busily, though DeepSpeed's builder
wants the architecture and its flags alone (`cpu_arch` and `simd_width` of deepspeed/ops/op_builder/builder.py).
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
    """Has py-cpuinfo, in this process and its forks, look once until the machine is booted anew.

    Args:
        file: where to keep what it saw; None for one in the user's cache.
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
            # Where the process that looks is killed, it sees nothing.
            if not info.keys() >= _ASKED_FOR:
                return info
            seen.update(info)
            # A disk that is full, or a home that cannot be written: the next process looks for itself.
            with contextlib.suppress(OSError):
                keep.parent.mkdir(parents=True, exist_ok=True)
                write_whole(keep, json.dumps({"boot": _boot(), "seen": info}))
        return copy.deepcopy(seen)

    cpuinfo.get_cpu_info = remembered


def _kept(file: Path) -> dict[str, Any]:
    """Returns what was seen since the machine was booted; nothing where that cannot be read, or is not whole."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        seen = dict(kept["seen"])
        if kept["boot"] == _boot() and seen.keys() >= _ASKED_FOR:
            return seen
    return {}


def _boot() -> str:
    """Returns which boot of which machine this is: a home may be shared, and a machine be given another processor."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
