"""Files that only their owner may read, written whole; and files of JSON lines that grow while others read them."""

import contextlib
import errno
import json
import os
import select
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A study's files may contain secrets, so only their owner may read them.
OWNERS_FILE, OWNERS_FOLDER = 0o600, 0o700

MOST_BYTES = 4 * 2**20
_LOOK_S = 0.05
_PIPE_S = 5.0


def open_own(path: Path, mode: str, **options: Any) -> Any:
    """Opens a file as `open` does. If this makes the file, only its owner may read it."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, OWNERS_FILE), **options)


def make_own(path: Path) -> None:
    """Makes an empty file that only its owner may read, for other writers, unless it exists."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, OWNERS_FILE))


def make_own_folder(path: Path) -> None:
    """Makes a folder, and missing folders above it, that only their owner may enter."""
    if not path.is_dir():
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER, exist_ok=True)


def write_whole(path: Path, text: str, mode: int = OWNERS_FILE) -> None:
    """Writes a file so that a reader sees all of it or nothing: to a temporary name beside it, then renamed.

    The text is on the disk before the file has its name, so this also holds after a loss of power. Raises OSError:
    the disk is full, or the folder cannot be written. The file is then as it was. If the disk fails after the
    renaming, the file is the new one.
    """
    _replace(path, text, mode)
    sync_folder(path.parent)


def write_all(files: Mapping[str, str]) -> None:
    """Writes files whole, each with its folder, from their texts by their paths. It waits once for each folder's names.
    Raises OSError: as `write_whole` does. Files before it may be new.
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
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
        content = _read_pipe(file.fileno(), most_bytes + 1) if is_pipe else file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise TooLargeError(f"it is larger than {most_bytes // 2**20} MiB")
    return content.decode("utf-8-sig")


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
    Raises OSError: the disk failed.
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


# Files of JSON lines: one process appends, others read while the file grows.

_BLOCK = 4096


@dataclass(frozen=True)
class Line:
    number: int  # from 1
    content: bytes  # its bytes, which should be JSON
    end: int  # bytes of the file up to the end of this line


class LineReader:
    """Reads the whole lines of a file, which need not exist yet, as it grows, each once."""

    def __init__(self, path: Path) -> None:
        self.end = 0  # bytes of the lines that have been read
        self._path = path
        self._lines = 0

    def read(self) -> Iterator[Line]:
        """Yields the lines since the last call. A torn last line comes later, when it is whole.

        A line counts as read when the caller asks for the next one: a loop that raises is given the line again. Raises
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
    """Adds one line, whole or not at all. Raises OSError: the disk is full; the file is as it was."""
    line = record.encode() + b"\n"
    with open(path, "ab", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)) as file:
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


# The file of a training's metrics: JSON lines that one process appends and others read.

TRAINING, VALIDATION, CHECKPOINT, NOTE, SYSTEM = "training", "validation", "checkpoint", "note", "system"

# Kinds with one line for each batch.
_ONCE_A_BATCH = (TRAINING, VALIDATION, CHECKPOINT)


@dataclass(frozen=True)
class MetricsRecord:
    kind: str  # `training`, `validation`, `checkpoint`, `note` or `system`
    end: int = 0  # bytes of the file up to the end of this line
    batch: int = 0  # optimizer steps done
    epoch: int | None = None  # from 0; None if the line has none
    time: float = 0.0  # seconds since the epoch
    metrics: dict[str, float] = field(default_factory=dict)  # by name
    name: str = ""  # of a checkpoint
    # The validation metric that decides which checkpoint is best; None for a checkpoint without one
    metric: float | None = None
    text: str = ""  # of a note

    def __str__(self) -> str:
        if self.kind == NOTE:
            return f"note: {self.text}"
        if self.kind == CHECKPOINT:
            return f"batch {self.batch}: checkpoint {self.name}"
        values = " ".join(f"{name} {value:.6g}" for name, value in self.metrics.items())
        return f"batch {self.batch}: {self.kind} {values}"


class MetricsReader:
    """Reads a metrics file, which need not exist yet, as it grows."""

    def __init__(self, path: Path) -> None:
        self._lines = LineReader(path)
        self._latest: dict[str, int] = {}  # kind -> the largest batch read

    def read(self) -> list[MetricsRecord]:
        """Returns the records since the last call. A line that is not whole yet comes later."""
        records = (_record(line) for line in self._lines.read())
        return [record for record in records if record is not None and self._is_news(record)]

    def _is_news(self, record: MetricsRecord) -> bool:
        if record.kind not in _ONCE_A_BATCH:
            return True
        if record.batch <= self._latest.get(record.kind, -1):
            return False
        self._latest[record.kind] = record.batch
        return True


def _record(line: Line) -> MetricsRecord | None:
    # The record of a line; None for a line that a killed process has damaged.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        data: dict[str, Any] = json.loads(line.content)
        metric, epoch, metrics = data.get("metric"), data.get("epoch"), data.get("metrics", {})
        return MetricsRecord(
            kind=str(data["kind"]),
            end=line.end,
            batch=int(data.get("batch", 0)),
            epoch=None if epoch is None else int(epoch),
            time=float(data.get("time", 0.0)),
            metrics={name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))},
            name=str(data.get("name", "")),
            metric=None if metric is None else float(metric),
            text=str(data.get("text", "")),
        )
    return None
