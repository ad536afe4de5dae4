"""Segments of shared memory, as files: which there are, who has them, and which a trial's program has made.

Python removes what a program leaves once its last process has ended. The processes of a trial are ended before that.

A rank imports this module from the user's environment: standard library only.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from trial_lib.wire.whole_files import open_own

FOLDER = Path("/dev/shm")
BUFFERS = "deepspeed_allreduce_buffer_"
"""How the names of the buffers begin that DeepSpeed's CPU collectives have there."""
OF_NCCL = "nccl-"
"""How the names of NCCL's segments begin. It removes the name of each as soon as those have it that are to: what has a
name and is nobody's was left by ranks that were killed while they connected."""

# include/linux/proc_ns.h: the namespaces that the kernel itself has made.
_OF_THE_HOST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_NAMESPACES = Path("/proc/self/ns")
_DELETED = " (deleted)"


def segments() -> dict[str, int]:
    """Returns this user's segments: the number of each by its name."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and entry.is_file(follow_symlinks=False):
                    found[entry.name] = status.st_ino
    return found


def held_by(processes: Iterable[int]) -> set[str]:
    """Returns the names of the segments that processes have mapped or open, as far as they may be looked at."""
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
    """Returns the names of the segments that some process of this host has mapped or open."""
    return held_by(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - names alone


def are_all_holders_seen() -> bool:
    """Returns whether no process can have a segment that this one cannot see.

    A container has its own shared memory, or by `--ipc=host` the host's, whose other processes it does not see.
    """
    is_hosts = {}
    for name, number in _OF_THE_HOST.items():
        try:
            is_hosts[name] = (_NAMESPACES / name).stat().st_ino == number
        except OSError:
            return False
    return is_hosts["pid"] or not is_hosts["ipc"]


def abandoned(prefix: str) -> set[str]:
    """Returns this user's segments whose names begin so, and that no process has any more."""
    named = {name for name in segments() if name.startswith(prefix)}
    return named - held_by_anybody() if named else set()


def _named_in(lines: Iterable[str]) -> set[str]:
    beginning = f"{FOLDER}/"
    found = (line[line.index(beginning) + len(beginning) :] for line in lines if beginning in line)
    return {name for name in found if not name.endswith(_DELETED)}


def note(scratch: Path, names: Iterable[str]) -> None:
    """Notes, in a rank, what it has made or holds; whoever cleans up behind it reads that.

    Args:
        scratch: the trial's scratch folder.
        names: of segments.
    """
    text = "".join(f"{name}\n" for name in names)
    # A disk that is full: what is left is told of all the same.
    with contextlib.suppress(OSError), open_own(_notes(scratch), "a", encoding="utf-8") as file:
        file.write(text)


def noted(scratch: Path) -> set[str]:
    """Returns what the ranks of a trial have noted."""
    try:
        return set(_notes(scratch).read_text(encoding="utf-8", errors="replace").splitlines())
    except OSError:
        return set()


def _notes(scratch: Path) -> Path:
    return scratch / "shared_memory"
