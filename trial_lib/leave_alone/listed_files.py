"""Listings of folders: a program finds the files that it has written, wherever they are, and none that it has removed.

`glob`, `os.walk` and `pathlib` list folders by the two functions that are replaced here.
"""
# What is called for every folder that a program lists takes paths as text.
# ruff: noqa: PTH118

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_real_access, _real_scandir = os.access, os.scandir


class ListedCopies(Protocol):
    """The copies of the user's files."""

    @property
    def has_changes(self) -> bool:
        """Whether the program sees any file differently from the disk."""

    def is_hidden(self, where: str) -> bool:
        """Returns whether a path is a folder of ZeroTune's that no listing shows."""

    def has_hidden(self, folder: str) -> bool:
        """Returns whether a folder has an entry that its listing does not show."""

    def path_of(self, path: Any) -> str:
        """Returns an absolute path as text."""

    def copy_of(self, where: str) -> str:
        """Returns the path of a file's copy, which may not exist."""

    def was_removed(self, where: str) -> bool:
        """Returns whether the program has removed a path that is older than the study."""


class _Entry:
    """An entry of a folder of copies, under the path that the program uses."""

    def __init__(self, copy: "os.DirEntry[str]", folder: Any) -> None:
        is_bytes = isinstance(folder, bytes)
        self.name: Any = os.fsencode(copy.name) if is_bytes else copy.name
        self.path: Any = os.path.join(folder, self.name)
        for look in ("inode", "is_dir", "is_file", "is_symlink", "stat"):
            setattr(self, look, getattr(copy, look))

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class _Entries:
    """The result of `os.scandir`: an iterator that can be closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        self._entries = entries

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration."""
        self._entries = iter(())


def _entries(files: ListedCopies, path: Any) -> list[Any] | None:
    """Returns the entries that a program has to find in a folder; None for the real ones."""
    is_open = isinstance(path, int)
    folder = f"/proc/self/fd/{path}" if is_open else os.fspath("." if path is None else path)
    where = os.readlink(folder) if is_open else files.path_of(folder)  # noqa: PTH115
    has_hidden = files.has_hidden(where)
    if not has_hidden and (is_open or not files.has_changes):
        return None
    copies = files.copy_of(where)
    has_copies, is_gone = _real_access(copies, os.F_OK), files.was_removed(where)
    if is_gone and not has_copies:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    written: dict[str, os.DirEntry[str]] = {}
    if has_copies:
        with _real_scandir(copies) as found:
            written = {entry.name: entry for entry in found}
    kept: list[Any] = []
    if not is_gone and (not has_copies or _real_access(where, os.F_OK)):
        with _real_scandir(folder) as found:
            kept = [
                entry
                for entry in found
                if (name := os.fsdecode(entry.name)) not in written
                and not files.was_removed(within := os.path.join(where, name))
                and not (has_hidden and files.is_hidden(within))
            ]
    return [*kept, *(_Entry(entry, folder) for entry in written.values())]


def _lists(files: ListedCopies, original: Any) -> Any:
    def listdir(path: Any = None) -> Any:
        entries = _entries(files, path)
        return original(path) if entries is None else [entry.name for entry in entries]

    return listdir


def _scans(files: ListedCopies, original: Any) -> Any:
    def scandir(path: Any = None) -> Any:
        entries = _entries(files, path)
        return original(path) if entries is None else _Entries(iter(entries))

    return scandir


STAND_INS: dict[str, Callable[[ListedCopies, Any], Any]] = {"listdir": _lists, "scandir": _scans}
"""Makes the replacement of a function of `os`."""
