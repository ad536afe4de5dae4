"""A small disk that may be filled, in memory: mounting it takes the right to."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


class CannotMountError(Exception):
    """This user may not mount a file system, and no other disk may be filled."""


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Has an empty disk of that size at `folder`.

    Raises:
        CannotMountError: this user may not mount it.
    """
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise CannotMountError(mounted.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave_mib: int) -> Path:
    """Fills the disk that a folder is on, but for so much; returns what fills it."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 2**16)
    if leave_mib:
        with ballast.open("r+b") as file:
            file.truncate(max(0, ballast.stat().st_size - leave_mib * 2**20))
    return ballast
