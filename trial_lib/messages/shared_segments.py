"""Segments of shared memory, as files: the segments that exist, their holders, and those of a trial's program.

Python removes a program's segments after the program's last process has ended. ZeroTune ends a trial's processes before
that.

A rank imports this module, so it needs only the standard library.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from zerotune.trial_lib.messages.files import open_own

FOLDER = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer_"  # the prefix of the buffers of DeepSpeed's CPU collectives
OF_NCCL = "nccl-"
"""The prefix of NCCL's segments.

NCCL removes a segment's name as soon as its ranks have mapped it. A segment that has a name and no holder is left over
from ranks that were killed while they connected.
"""

# include/linux/proc_ns.h: the inode numbers of the namespaces that the kernel makes at boot.
_OF_THE_HOST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_NAMESPACES = Path("/proc/self/ns")
_DELETED = " (deleted)"


def segments() -> dict[str, int]:
    """Returns the inode number of each of this user's segments by its name."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and entry.is_file(follow_symlinks=False):
                    found[entry.name] = status.st_ino
    return found


def held_by(processes: Iterable[int]) -> set[str]:
    """Returns the names of the segments that processes have mapped or open.

    Processes that this one may not inspect are left out.
    """
    held: set[str] = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            held.update(_named_in(Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()))
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone
                with contextlib.suppress(OSError):
                    held.update(_named_in([os.readlink(f"/proc/{pid}/fd/{descriptor}")]))  # noqa: PTH115
    return held


def held_by_anybody() -> set[str]:
    return held_by(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names alone


def are_all_holders_seen() -> bool:
    """Returns whether this process sees every process that may hold a segment.

    A container has its own shared memory. With `--ipc=host` it has the host's, and does not see the host's other
    processes.
    """
    is_hosts = {}
    for name, number in _OF_THE_HOST.items():
        try:
            is_hosts[name] = (_NAMESPACES / name).stat().st_ino == number
        except OSError:
            return False
    return is_hosts["pid"] or not is_hosts["ipc"]


def abandoned(prefix: str) -> set[str]:
    """Returns the names of this user's segments that have a prefix, and that no process holds."""
    named = {name for name in segments() if name.startswith(prefix)}
    return named - held_by_anybody() if named else set()


def _named_in(lines: Iterable[str]) -> set[str]:
    beginning = f"{FOLDER}/"
    found = (line[line.index(beginning) + len(beginning) :] for line in lines if beginning in line)
    return {name for name in found if not name.endswith(_DELETED)}


def note(scratch: Path, names: Iterable[str]) -> None:
    """Records, in a rank, segments that it has made or holds, for the process that cleans up after it."""
    text = "".join(f"{name}\n" for name in names)
    # On a full disk the record is lost. The remaining segments are still reported.
    with contextlib.suppress(OSError), open_own(_notes(scratch), "a", encoding="utf-8") as file:
        file.write(text)


def noted(scratch: Path) -> set[str]:
    try:
        return set(_notes(scratch).read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return set()


def _notes(scratch: Path) -> Path:
    return scratch / "shared_memory"
