"""The memory of the host that this process may still use. Both the machine and the control groups limit it.

A rank imports this module, so it needs only the standard library.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Files:
    """The names of the files that show a control group's memory."""

    limit: str
    used: str
    reclaimable: str
    events: str


# Names from cgroup-v2.rst and cgroup-v1/memory.rst of the kernel's documentation.
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The bytes that processes here may still take before the kernel kills one; None if the kernel does not show it.

    The kernel keeps files in memory, and can drop them. Such memory counts as free, in the machine and in a control
    group.

    Args:
        proc: the folder in which the kernel shows processes.
        cgroups: the folder in which it shows control groups.
    """
    shown = _fields(proc / "meminfo")
    machine = [shown[name] * 1024 for name in ("MemAvailable:", "MemFree:") if name in shown][:1]
    groups = (_left_in(folder, files) for folder, files in _groups(proc, cgroups))
    return min([*machine, *(left for left in groups if left is not None)], default=None)


def kernel_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """A count that grows with each process that the kernel kills because memory has run out; None if it shows none.

    Some containers do not see the machine's counter. Their control groups have counters of their own.

    Args:
        proc: the folder in which the kernel shows processes.
        cgroups: the folder in which it shows control groups.
    """
    counters = (proc / "vmstat", *(folder / files.events for folder, files in _groups(proc, cgroups)))
    shown = [_fields(file, beginning="oom_kill").get("oom_kill") for file in counters]
    return None if all(count is None for count in shown) else sum(count or 0 for count in shown)


def has_killed(before: int | None, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> bool | None:
    """Whether `kernel_kills` has grown since it was `before`; None if the kernel does not show it."""
    now = kernel_kills(proc, cgroups)
    return None if now is None or before is None else now > before


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
            # A container may see the path of the host here, while its own group is mounted at the root.
            own = mount / path.strip("/")
            yield from ((folder, files) for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _left_in(folder: Path, files: _Files) -> int | None:
    """The bytes that a control group may still take; None if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in (files.limit, files.used))
        return max(0, limit - used + _fields(folder / "memory.stat").get(files.reclaimable, 0))
    return None


def _fields(path: Path, beginning: str = "") -> dict[str, int]:
    """The numbers in a file with a name and a number on each line; empty if the file is missing.

    Args:
        path: the file.
        beginning: of the names to read.
    """
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if not line.startswith(beginning):
                continue
            with contextlib.suppress(ValueError, IndexError):
                fields[line.split()[0]] = int(line.split()[1])
    return fields
