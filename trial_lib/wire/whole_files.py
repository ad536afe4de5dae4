"""Writing files that are their owner's alone, and writing them whole.

A rank imports this module from the user's environment: standard library only.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWNERS_FILE, OWNERS_FOLDER = 0o600, 0o700
"""What a study writes may hold secrets: nobody else reads it."""

MOST_BYTES = 4 * 2**20


def open_own(path: Path, mode: str, **options: Any) -> Any:
    """Opens a file, which is its owner's alone where this makes it. Otherwise as `open`."""
    return open(path, mode, opener=_make_own, **options)


def make_own(path: Path) -> None:
    """Makes an empty file that is its owner's alone, for others to write to, where there is none."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, OWNERS_FILE))


def make_own_folder(path: Path) -> None:
    """Makes a folder, and those above it that are missing, its owner's alone."""
    if not path.is_dir():
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER, exist_ok=True)


def _make_own(path: str, flags: int) -> int:
    return os.open(path, flags, OWNERS_FILE)


def write_whole(path: Path, text: str, mode: int = OWNERS_FILE) -> None:
    """Writes a file so that a reader sees all of it or nothing: to a temporary name beside it, then renamed.

    That holds when the power goes, too: its text is on the disk before it has its name, which is when this returns.

    Args:
        path: the file.
        text: all that it is to hold.
        mode: who may read it.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the file is then as it was. Where the disk failed
            after the renaming, the file is the new one.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(files: Mapping[str, str]) -> None:
    """Writes files whole, each with its folder, from their texts by their paths."""
    for path, text in files.items():
        make_own_folder(Path(path).parent)
        write_whole(Path(path), text)


def read_bounded(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Returns the text of a file that people have named, no more than anybody writes by hand: it may be a device.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or larger than that.
    """
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TooLargeError(f"it is larger than {most_bytes // 2**20} MiB")
    return content.decode("utf-8-sig")


class TooLargeError(ValueError):
    """A file that has another purpose than the one it is named for."""


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk: what was created, renamed or removed there is so after a loss of power.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse this for folders: they order names themselves, and nothing can be done here.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
