"""Writes files that only their owner may read, and writes them whole.

A rank imports this module, so it needs only the standard library.
"""

import contextlib
import errno
import os
import select
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWNERS_FILE, OWNERS_FOLDER = 0o600, 0o700
"""A study's files may contain secrets, so only their owner may read them."""

MOST_BYTES = 4 * 2**20
_LOOK_S = 0.05
_PIPE_S = 5.0


def open_own(path: Path, mode: str, **options: Any) -> Any:
    """Opens a file as `open` does. If this makes the file, only its owner may read it."""
    return open(path, mode, opener=_make_own, **options)


def make_own(path: Path) -> None:
    """Makes an empty file that only its owner may read, for other writers, unless it exists."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, OWNERS_FILE))


def make_own_folder(path: Path) -> None:
    """Makes a folder, and missing folders above it, that only their owner may enter."""
    if not path.is_dir():
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER, exist_ok=True)


def _make_own(path: str, flags: int) -> int:
    return os.open(path, flags, OWNERS_FILE)


def write_whole(path: Path, text: str, mode: int = OWNERS_FILE) -> None:
    """Writes a file so that a reader sees all of it or nothing: to a temporary name beside it, then renamed.

    The text is on the disk before the file has its name, so this also holds after a loss of power.

    Args:
        path: the file.
        text: the whole content.
        mode: the permissions.

    Raises:
        OSError: the disk is full, or the folder cannot be written. The file is then as it was. If the disk fails after
            the renaming, the file is the new one.
    """
    _replace(path, text, mode)
    sync_folder(path.parent)


def write_all(files: Mapping[str, str]) -> None:
    """Writes files whole, each with its folder, from their texts by their paths. It waits once for each folder's names.

    Raises:
        OSError: as `write_whole` does. Files before it may be new.
    """
    paths = [Path(path) for path in files]
    for path, text in zip(paths, files.values(), strict=True):
        make_own_folder(path.parent)
        _replace(path, text, OWNERS_FILE)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


def _replace(path: Path, text: str, mode: int) -> None:
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


def read_bounded(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Returns the text of a file that a user has named, up to a size. The name may be a device's, or a pipe's.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or larger than that.
    """
    # Opening a pipe would wait for a process that writes to it.
    with open(path, "rb", opener=_without_waiting) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        content = _read_pipe(file.fileno(), most_bytes + 1) if is_pipe else file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TooLargeError(f"it is larger than {most_bytes // 2**20} MiB")
    return content.decode("utf-8-sig")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read_pipe(descriptor: int, most_bytes: int) -> bytes:
    content, deadline = b"", time.monotonic() + _PIPE_S
    while len(content) < most_bytes:
        # Linux tells no end of a pipe whose writer had closed it before it was opened here; reading does.
        is_ready = bool(select.select([descriptor], [], [], _LOOK_S)[0])
        try:
            read = os.read(descriptor, most_bytes - len(content))
        except BlockingIOError:
            read = None
        if read:
            content += read
        elif read is not None and (is_ready or content):
            break
        elif time.monotonic() > deadline:
            raise TimeoutError(f"it is a pipe, and its end has not come within {_PIPE_S:.0f} s")
    return content


class TooLargeError(ValueError):
    """A file that is too large for its purpose, and probably another kind of file."""


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, so that new, renamed and removed files survive a loss of power.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse this for folders. They order names themselves, so nothing has to be done.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
