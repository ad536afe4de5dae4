"""The host's memory, as far as this process may use it: the machine's, and what its control groups allow.

A rank imports this module: standard library only.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    """What the files of a control group's memory are called."""

    limit: str
    used: str
    reclaimable: str
    events: str


# cgroup-v2.rst and cgroup-v1/memory.rst of the kernel's documentation.
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Returns the bytes that processes here may still take before the kernel kills one; None where it does not say.

    Files that the kernel keeps in memory and can drop count as free, the machine's and a control group's alike.

    Args:
        proc: where the kernel shows processes.
        cgroups: where it shows control groups.
    """
    shown = _fields(proc / "meminfo")
    machine = [shown[name] * 1024 for name in ("MemAvailable:", "MemFree:") if name in shown][:1]
    groups = (_left_in(folder, files) for folder, files in _groups(proc, cgroups))
    return min([*machine, *(left for left in groups if left is not None)], default=None)


def kernel_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Returns a count that grows with each process that the kernel kills for want of memory.

    The machine's counter is hidden from some containers, whose control groups have one of their own.

    Args:
        proc: where the kernel shows processes.
        cgroups: where it shows control groups.
    """
    groups = (_fields(folder / files.events) for folder, files in _groups(proc, cgroups))
    return sum(shown.get("oom_kill", 0) for shown in (_fields(proc / "vmstat"), *groups))


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Files]]:
    """Yields the folders of the control groups that this process is in, innermost first."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                mount, files = cgroups, _V2
            elif "memory" in controllers.split(","):
                mount, files = cgroups / "memory", _V1
            else:
                continue
            # A container may be shown the path that the host has, and its own group where the root would be.
            own = mount / path.strip("/")
            yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _left_in(folder: Path, files: _Files) -> int | None:
    """Returns what a control group may still take; None where it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        return max(0, limit - used + _fields(folder / "memory.stat").get(files.reclaimable, 0))
    return None


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers of a file that has a name and a number on each line; empty where there is no such file."""
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, IndexError):
                fields[line.split()[0]] = int(line.split()[1])
    return fields
