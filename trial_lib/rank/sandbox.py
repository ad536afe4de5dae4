"""The sandbox of a rank: the program's changes of files go to the trial, by its layer or by replaced functions.

`UserFiles` decides what Python's replaced functions for files do.
"""


# What is called for every file that a program opens takes paths as text.
# ruff: noqa: PTH112, PTH118, PTH120

import builtins
import errno
import functools
import io
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.folders import read_layer
from zerotune.trial_lib.messages.orders import RankOrder
from zerotune.trial_lib.rank import redirects
from zerotune.trial_lib.rank.patching import put, stand_in
from zerotune.trial_lib.rank.user_files import LayeredFiles, UserFiles, is_there

_READS = ("r", "rb", "rt")
_WRITES = os.O_WRONLY | os.O_RDWR
# The functions as the modules of the standard library call them, which bind them to names of their own.
_NAMES_OF_OPEN = ("open", "_builtin_open", "bltn_open")

_real_access, _real_scandir = os.access, os.scandir
_real_unlink, _real_replace = os.unlink, os.replace

# Listings: a program finds the files that it has written, wherever they are, and none that it has removed.


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
        self._entries = iter(())


def _entries(files: UserFiles, path: Any) -> list[Any] | None:
    # The entries that a program has to find in a folder; None for the real ones.
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


def _lists(files: UserFiles, original: Any, path: Any = None) -> Any:
    entries = _entries(files, path)
    return original(path) if entries is None else [entry.name for entry in entries]


def _scans(files: UserFiles, original: Any, path: Any = None) -> Any:
    entries = _entries(files, path)
    return original(path) if entries is None else _Entries(iter(entries))


def install(
    scratch: Path,
    protected_before: float,
    folder: Path,
    layered_device: int | None = None,
    hidden: Iterable[str] = (),
    records: Iterable[Path] = (),
) -> UserFiles:
    """Protects the user's files from this process and its forks, with the arguments of `UserFiles`."""
    files = UserFiles(scratch, protected_before, folder, layered_device, hidden, records)
    _replace_open(files)
    for name, call in _STAND_INS.items():
        original = getattr(os, name)
        _replace(os, name, _like(original, functools.partial(call, files, original)))
    _replace_rmtree(files)
    redirects.redirect_saved_files(files)
    return files


def _like(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return functools.update_wrapper(functools.partial(replacement), original)


def _replace(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    # Replaces a function of `os`, also in Python's lists of what such functions support.
    original = getattr(module, name)
    put(module, name, replacement)
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in able:
            able.add(replacement)
    # Python 3.10 has its copies here, and the copy of `io` has the name `open`.
    accessor = getattr(pathlib, "_normal_accessor", None)
    if getattr(accessor, name, None) is original:
        put(accessor, name, replacement)


def _replace_open(files: UserFiles) -> None:
    original = builtins.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") is None and not isinstance(file, int):
            if mode in _READS or not set(mode) & set("wax+"):
                file = files.seen(file)
            else:
                file = files.to_write(file, keeps="w" not in mode and "x" not in mode, creates="x" in mode)
        return original(file, mode, *args, **kwargs)

    replacement = _like(original, open_)
    # This must come before the loop, which would find this module too. Python 3.10 has the copy elsewhere as well.
    _replace(io, "open", replacement)
    for name in _NAMES_OF_OPEN:
        stand_in(name, original, replacement)
    put(builtins, "open", replacement)


def _os_open(
    files: UserFiles, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    if not flags & _WRITES:
        path = files.seen(path, dir_fd)
    else:
        creates = flags & os.O_CREAT and flags & os.O_EXCL
        asked, path = path, files.to_write(path, not flags & os.O_TRUNC, bool(creates), dir_fd)
        if path is not asked:
            # The program takes the copy of a file to be the file.
            flags |= os.O_CREAT
    number: int = original(path, flags, mode, dir_fd=dir_fd)
    return number


def _looks(files: UserFiles, original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
    return original(files.seen(path, dir_fd), *args, dir_fd=dir_fd, **kwargs)


def _accesses(
    files: UserFiles, original: Any, path: Any, mode: int, *, dir_fd: int | None = None, **kwargs: Any
) -> bool:
    try:
        path = files.seen(path, dir_fd)
    except FileNotFoundError:
        return False
    answer: bool = original(path, mode, dir_fd=dir_fd, **kwargs)
    return answer


def _removes(files: UserFiles, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
    where = files.path_of(path, dir_fd)
    is_here = not (files.has_copy(where) or files.is_old(where, follow=False))
    if not is_here:
        files.removed(where)
    # The program may have put files below the copy before it trained.
    if is_here or files.is_new(where):
        original(path, dir_fd=dir_fd)


def _renames(
    files: UserFiles, original: Any, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
) -> None:
    source, target = files.path_of(src, src_dir_fd), files.path_of(dst, dst_dir_fd)
    if files.has_copy(source):
        _real_replace(files.copy_of(source), files.new_copy(target))
        files.removed(source)
        if files.is_new(source) and not is_there(source, as_folder=True):
            _real_unlink(source)
    elif files.holds_old(source):
        files.removed(source)
    elif files.has_copy(target) or (files.is_old(target, follow=False) and not os.path.isdir(target)):
        shutil.move(source, files.new_copy(target))
    else:
        try:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            # A layer cannot rename a folder that is below it.
            if error.errno != errno.EXDEV or not (files.is_layered(source) and files.is_layered(target)):
                raise
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(source)


def _makes(files: UserFiles, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(path, *args, **kwargs)
    except FileExistsError:
        # The file from before the study is still there.
        where = files.path_of(path, kwargs.get("dir_fd"))
        if not files.was_removed(where):
            raise
        if is_there(where, as_folder=True):
            files.made_again(where)


def _makes_link(files: UserFiles, original: Any, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
    where = files.path_of(dst, kwargs.get("dir_fd"))
    named = os.path.join(os.path.dirname(where), os.fsdecode(src))
    if files.has_copy(files.path_of(named)) or files.was_removed(where):
        original(files.seen(named), files.new_copy(where))
    else:
        original(src, dst, *args, **kwargs)


def _links(files: UserFiles, original: Any, src: Any, dst: Any, **kwargs: Any) -> None:
    source = files.path_of(src, kwargs.get("src_dir_fd"))
    if files.has_copy(source) or files.is_old(source):
        # A hard link would count as a change of the file. The file could then be changed by another name.
        shutil.copy2(files.seen(source), files.path_of(dst, kwargs.get("dst_dir_fd")))
    else:
        original(src, dst, **kwargs)


def _touches(files: UserFiles, original: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(path, int):
        # A file that was opened to be read may be the user's.
        if not files.is_old(os.readlink(f"/proc/self/fd/{path}")):  # noqa: PTH115
            original(path, *args, **kwargs)
        return
    where = files.path_of(path, kwargs.get("dir_fd"))
    if files.has_copy(where):
        original(files.copy_of(where), *args, **kwargs)
    elif not files.is_old(where):
        original(path, *args, **kwargs)


def _truncates(files: UserFiles, original: Any, path: Any, length: int) -> None:
    original(files.to_write(path, keeps=True), length)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "listdir": _lists,
    "scandir": _scans,
    "open": _os_open,
    "stat": _looks,
    "lstat": _looks,
    "readlink": _looks,
    "access": _accesses,
    "unlink": _removes,
    "remove": _removes,
    "rmdir": _removes,
    "rename": _renames,
    "replace": _renames,
    "mkdir": _makes,
    "symlink": _makes_link,
    "link": _links,
    "truncate": _truncates,
    **dict.fromkeys(("utime", "chmod", "chown", "lchown", "setxattr", "removexattr"), _touches),
    **dict.fromkeys(("fchmod", "fchown"), _touches),
}


def _replace_rmtree(files: UserFiles) -> None:
    original = shutil.rmtree

    @functools.wraps(original)
    def rmtree(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        where = files.path_of(path, dir_fd)
        if files.holds_old(where):
            files.removed(where)
            return
        if files.has_copy(where):
            files.removed(where)
            if not is_there(where):
                return
        if sys.version_info >= (3, 11):
            original(path, *args, dir_fd=dir_fd, **kwargs)
        else:
            original(path, *args, **kwargs)

    stand_in("rmtree", original, rmtree)


class Sandbox:
    """The protection of the user's files and runs in one rank of a trial."""

    def __init__(self, order: RankOrder, rank: int) -> None:
        self._is_first = rank == 0  # restores what all ranks have changed
        self._scratch = Path(order.scratch)
        layer = read_layer(self._scratch)
        self._layered = None if layer is None else LayeredFiles(layer)
        self.files = install(
            self._scratch,
            order.protected_before,
            Path(order.model_dir),
            None if self._layered is None else self._layered.device,
            order.hidden,
            {Path(size.logs[rank]).parent for size in order.sizes},
        )
        redirects.install_trackers(self._scratch, self.files)

    @property
    def way(self) -> str:
        """How the files are protected, as `Measured.files` has it."""
        return "intercepted" if self._layered is None else "layered"

    def training_began(self) -> None:
        self.files.training_began()
        if self._layered is not None and self._is_first:
            self._layered.note_prepared(self.files.filled)

    def start_over(self) -> None:
        """Makes the files as they were before the program ran. No rank may run it meanwhile."""
        self.files.start_over()
        if self._layered is not None and self._is_first:
            self._layered.go_back()
        shutil.rmtree(self._scratch / "output", ignore_errors=True)
