"""Files of JSON lines: one process appends, others read while the file grows.

A killed process may leave a torn last line, without its newline. A reader waits for the rest of such a line, and the
next writer drops it before it appends. A rank imports this module, so it needs only the standard library.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trial_lib.wire.whole_files import OWNERS_FILE

_BLOCK = 4096


@dataclass(frozen=True)
class Line:
    """One whole line.

    Attributes:
        number: from 1.
        content: its bytes, which should be JSON.
        end: bytes of the file up to the end of this line.
    """

    number: int
    content: bytes
    end: int


class LineReader:
    """Reads the whole lines of a file as it grows, each once.

    Args:
        path: the file; it need not exist yet.

    Attributes:
        end: bytes of the lines that have been read.
    """

    def __init__(self, path: Path) -> None:
        self.end = 0
        self._path = path
        self._lines = 0

    def read(self) -> Iterator[Line]:
        """Yields the lines since the last call. A torn last line comes later, when it is whole.

        A line counts as read when the caller asks for the next one: a loop that raises is given the line again.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self.end)
                new = file.read()
        except FileNotFoundError:
            return
        *whole, _torn = new.split(b"\n")
        for content in whole:
            line = Line(self._lines + 1, content, self.end + len(content) + 1)
            yield line
            self._lines, self.end = line.number, line.end


def append(path: Path, record: str, *, fsync: bool = False, mode: int = OWNERS_FILE) -> None:
    """Adds one line, whole or not at all.

    Args:
        path: the file, which is made if it is missing.
        record: JSON without a line break, as `json.dumps` returns it.
        fsync: whether the line has to be on the disk before this returns.
        mode: permissions of a file that this makes.

    Raises:
        OSError: the disk is full; the file is as it was.
    """

    def make(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    line = record.encode() + b"\n"
    with open(path, "ab", buffering=0, opener=make) as file:
        length = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if fsync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def drop_torn_tail(path: Path) -> None:
    """Removes the torn last line that a killed process left, so that the next line begins on its own.

    Only the writer may call this, because the line of another writer may not be whole yet.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        length = size
        while length > 0:
            start = max(0, length - _BLOCK)
            file.seek(start)
            newline = file.read(length - start).rfind(b"\n")
            if newline >= 0:
                length = start + newline + 1
                break
            length = start
        if length < size:
            file.truncate(length)
