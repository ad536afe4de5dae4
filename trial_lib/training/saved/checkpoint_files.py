"""The files of a checkpoint: their list, writing them to the disk, and whether they are still intact."""

import hashlib
import heapq
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

FileRecord = dict[str, Any]
"""The manifest's record of a file: `bytes`, and `sha256` in hexadecimal digits."""

CHUNK_BYTES = 1 << 20


def files_below(folder: Path) -> list[str]:
    """Returns the paths of all files below a folder, relative to it; symbolic links to folders are not followed."""
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


def folders_below(folder: Path) -> list[Path]:
    """Returns all folders below a folder, without itself."""
    return [Path(parent, name) for parent, names, _ in os.walk(folder) for name in names]


def dealt(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Deals files to the ranks, with about equal bytes: the largest first, to the rank with the least.

    The same sizes are dealt alike on every rank.
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]  # bytes, files, rank
    for size, name in sorted(((size, name) for name, size in sizes.items()), key=lambda file: (-file[0], file[1])):
        held, files, rank = heapq.heappop(loads)
        shares[rank].append(name)
        heapq.heappush(loads, (held + size, files + 1, rank))
    return shares


def seal(paths: list[Path]) -> list[FileRecord]:
    """Writes files to the disk and returns their records.

    Raises:
        OSError: one is missing, or the disk is full or fails.
    """
    # One waits for the disk and the other for the processor, so together they take half the time.
    with ThreadPoolExecutor(1) as syncing:
        synced = syncing.map(_sync, paths)
        records = [_record(path) for path in paths]
        list(synced)  # raises what a sync has raised
    return records


def problem_of_size(path: Path, name: str, record: FileRecord) -> str | None:
    """Returns how a file's size differs from its record, or None. The file is not read."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if size == record["bytes"] else f"{name} has {size} bytes, not {record['bytes']}"


def problem_of_content(path: Path, name: str, record: FileRecord) -> str | None:
    """Returns how a file's content differs from its record, or None."""
    try:
        with path.open("rb") as file:
            digest = _digest(file)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if digest == record["sha256"] else f"{name} has the right size and another content"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}


def _digest(file: BinaryIO) -> str:
    if sys.version_info >= (3, 11):
        return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
