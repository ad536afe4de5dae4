"""A trial leaves the user's files as they are.

A trial trains a few steps, with a setting that may well be a bad one. What it would leave behind is of no use to
anybody, and must cost the user nothing. So, in the ranks of a trial:

* A file that is older than the study is never changed. Whoever opens it for writing gets a copy in the trial's folder,
  and so does every rank that reads it afterwards, or lists its folder. Whoever removes, renames or touches it is told
  that it is done.
* What the program makes before its first optimizer step is its preparation. New files stay where the program puts
  them, whatever it writes them with: all ranks find them, other processes do, and so does the next trial.
* Checkpoints of the training that follows go to a folder of the trial's own, which is removed with it: what
  `torch.save`, `safetensors` and `torch.distributed.checkpoint` write, wherever it should have gone. In the same trial
  they are read and listed as if they were there. (An engine's `save_checkpoint` saves nothing at all: see
  `interception`. Hugging Face's: see `hugging_face`.)

Temporary folders, caches and devices are left out of this, but for what stands in the program's own folder. Not seen is
what a library writes past Python's `open` (SQLite, HDF5), and what another program does that this one starts.
"""
# What is called for every file that a program opens takes paths as text.
# ruff: noqa: PTH100, PTH112, PTH115, PTH117, PTH118, PTH120

import builtins
import errno
import functools
import io
import os
import pathlib
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trial_lib.measure import checkpoint_files, listed_files
from trial_lib.measure.interception import stand_in

_CACHES = (
    *("HF_DATASETS_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME"),
    *("CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TRITON_CACHE_DIR"),
    *("MPLCONFIGDIR", "NUMBA_CACHE_DIR"),
)
_READS = ("r", "rb", "rt")
_WRITES = os.O_WRONLY | os.O_RDWR
# As the standard library's modules call it that have it under a name of their own.
_NAMES_OF_OPEN = ("open", "_builtin_open", "bltn_open")

_real_stat, _real_lstat, _real_access = os.stat, os.lstat, os.access
_real_listdir, _real_makedirs = os.listdir, os.makedirs
_real_open, _real_unlink, _real_replace = builtins.open, os.unlink, os.replace


class UserFiles:
    """Which of the user's files are protected, and where their copies are.

    Args:
        scratch: the trial's folder for what would change them.
        protected_before: seconds since the epoch; what has not changed since is protected.
        folder: the program's own.

    Attributes:
        is_training: whether the program has taken an optimizer step: what it saves from then on is no preparation.
    """

    def __init__(self, scratch: Path, protected_before: float, folder: Path) -> None:
        self._copies = str(scratch / "files")
        self._before = protected_before
        self._removed: set[str] = set()
        self.is_training = False
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path's own raises where there is no home
        free = ["/dev", "/proc", "/sys", "/tmp", "/var/tmp", tempfile.gettempdir(), scratch.parent]
        free += [home / ".cache", home / ".triton", *(os.environ[name] for name in _CACHES if os.environ.get(name))]
        roots = {f"{root}{os.sep}": True for place in free for root in _spellings(place)}
        roots.update({f"{root}{os.sep}": False for root in _spellings(folder)})
        # The deepest folder decides.
        self._roots = sorted(roots.items(), key=lambda root: -len(root[0]))

    def start_over(self) -> None:
        """Forgets what the program has written and removed: it is run again. No other rank may run it meanwhile."""
        shutil.rmtree(self._copies, ignore_errors=True)
        self._removed.clear()
        self.is_training = False

    def training_began(self) -> None:
        """Notes that the program has prepared what it trains with."""
        self.is_training = True

    def is_free(self, where: str) -> bool:
        """Returns whether a path is below a folder that none of this concerns."""
        return next((is_free for root, is_free in self._roots if where.startswith(root)), False)

    def path_of(self, path: Any, dir_fd: int | None = None) -> str:
        """Returns a path as text, absolute, where it may be relative to an open folder."""
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text)

    def copy_of(self, where: str) -> str:
        """Returns where the copy of a path is, or would be."""
        return self._copies + where

    @property
    def has_changes(self) -> bool:
        """Whether there is anything that the program sees otherwise than it is."""
        return bool(self._removed) or _exists(self._copies)

    def has_copy(self, where: str) -> bool:
        """Returns whether a rank of this trial has written a path."""
        return _exists(self._copies) and _exists(self._copies + where)

    def seen(self, path: Any, dir_fd: int | None = None) -> Any:
        """Returns what to read in the place of a path: its copy, if there is one, else the path as it is."""
        if isinstance(path, int) or not self.has_changes:
            return path
        where = self.path_of(path, dir_fd)
        if _exists(self._copies + where):
            return self._copies + where
        if self.was_removed(where):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path

    def is_old(self, where: str, follow: bool = True) -> bool:
        """Returns whether a path is something that was there before the study, and is to stay as it is."""
        try:
            found = _real_stat(where) if follow else _real_lstat(where)
        except (OSError, ValueError):
            return False
        is_file = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)
        return is_file and found.st_ctime < self._before and not self.is_free(where)

    def is_new(self, where: str) -> bool:
        """Returns whether a path is something that has come since the study began."""
        return _is_there(where) and not self.is_old(where, follow=False)

    def holds_old(self, where: str) -> bool:
        """Returns whether a path is old, or a folder with something old in it."""
        if self.is_old(where, follow=False):
            return True
        if self.is_free(where) or not _is_there(where, as_folder=True):
            return False
        return any(self.holds_old(os.path.join(where, name)) for name in _real_listdir(where))

    def removed(self, where: str) -> None:
        """Notes that the program takes a path to be gone, with everything below it."""
        copy = self.copy_of(where)
        if os.path.isdir(copy):
            shutil.rmtree(copy, ignore_errors=True)
        elif _exists(copy):
            _real_unlink(copy)
        self._removed.add(where)

    def was_removed(self, where: str) -> bool:
        """Returns whether the program takes a path to be gone that was there before the study."""
        is_below = any(where == path or where.startswith(path + os.sep) for path in self._removed)
        return is_below and self.is_old(where, follow=False)

    def made_again(self, where: str) -> None:
        """Notes that the program has made a folder anew that it takes to be gone: now only what is in it is."""
        self._removed.discard(where)
        self._removed.update(os.path.join(where, name) for name in _real_listdir(where))

    def new_copy(self, where: str) -> str:
        """Returns the path for a copy, whose folder is there; what it holds is for the caller to write."""
        copy = self.copy_of(where)
        _real_makedirs(os.path.dirname(copy), exist_ok=True)
        return copy

    def to_write(self, path: Any, keeps: bool, creates: bool = False, dir_fd: int | None = None) -> Any:
        """Returns what to write in the place of a path.

        Args:
            path: what the program opens.
            keeps: whether what the file holds is kept at first (it is appended to, or changed in the middle).
            creates: whether a file that exists is an error.
            dir_fd: the open folder that the path is relative to.
        """
        if isinstance(path, int):
            return path
        where = self.path_of(path, dir_fd)
        if self.has_copy(where):
            return self.copy_of(where)
        if not self.is_old(where) or os.path.isdir(where):
            return path
        gone = self.was_removed(where)
        if creates and not gone:
            return path
        copy = self.new_copy(where)
        if keeps and not gone:
            _copy_once(where, copy)
        return copy


def _spellings(path: Any) -> set[str]:
    return {os.path.abspath(path), os.path.realpath(path)}


def _exists(path: str) -> bool:
    # Several times faster than an `os.stat` that fails, and this is asked at every `open`.
    return "\0" not in path and _real_access(path, os.F_OK)


def _is_there(path: str, as_folder: bool = False) -> bool:
    """Returns whether something, or a folder, is really at a path; a link is one."""
    try:
        found = _real_lstat(path)
    except (OSError, ValueError):
        return False
    return not as_folder or stat.S_ISDIR(found.st_mode)


def _copy_once(original: str, copy: str) -> None:
    """Copies a file whole, once for all the ranks that may do so at the same time."""
    aside = f"{copy}.{os.getpid()}"
    with _real_open(original, "rb") as source, _real_open(aside, "wb") as target:
        shutil.copyfileobj(source, target)
    try:
        os.link(aside, copy)
    except FileExistsError:
        pass
    finally:
        _real_unlink(aside)


def install(scratch: Path, protected_before: float, folder: Path) -> UserFiles:
    """Protects the user's files from this process and what it forks; to be called before the user's program runs.

    Args:
        scratch: the trial's folder for what would change them.
        protected_before: seconds since the epoch; what has not changed since is protected.
        folder: the program's own.
    """
    files = UserFiles(scratch, protected_before, folder)
    _replace_open(files)
    for name, make in {**_STAND_INS, **listed_files.STAND_INS}.items():
        original = getattr(os, name)
        _replace(os, name, _like(original, make(files, original)))
    _replace_rmtree(files)
    checkpoint_files.install(files)
    return files


def _like(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement that does not become a method where a class has it, as a built-in function does not."""
    return functools.update_wrapper(functools.partial(replacement), original)


def _replace(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Puts a function of `os` in the place of another one, also where Python keeps lists of what they can do."""
    original = getattr(module, name)
    setattr(module, name, replacement)
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in able:
            able.add(replacement)
    # Python 3.10 keeps them here.
    accessor = getattr(pathlib, "_normal_accessor", None)
    if accessor is not None and hasattr(accessor, name):
        setattr(accessor, name, replacement)


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
    for name in _NAMES_OF_OPEN:
        stand_in(name, original, replacement)
    builtins.open = replacement
    _replace(io, "open", replacement)


def _os_open(files: UserFiles, original: Any) -> Any:
    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & _WRITES:
            path = files.seen(path, dir_fd)
        else:
            creates = flags & os.O_CREAT and flags & os.O_EXCL
            asked, path = path, files.to_write(path, not flags & os.O_TRUNC, bool(creates), dir_fd)
            if path is not asked:
                # The copy of a file that the program takes to be there already.
                flags |= os.O_CREAT
        number: int = original(path, flags, mode, dir_fd=dir_fd)
        return number

    return open_


def _looks(files: UserFiles, original: Any) -> Any:
    def look(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        return original(files.seen(path, dir_fd), *args, dir_fd=dir_fd, **kwargs)

    return look


def _accesses(files: UserFiles, original: Any) -> Any:
    def access(path: Any, mode: int, *, dir_fd: int | None = None, **kwargs: Any) -> bool:
        try:
            path = files.seen(path, dir_fd)
        except FileNotFoundError:
            return False
        answer: bool = original(path, mode, dir_fd=dir_fd, **kwargs)
        return answer

    return access


def _removes(files: UserFiles, original: Any) -> Any:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        where = files.path_of(path, dir_fd)
        is_here = not (files.has_copy(where) or files.is_old(where, follow=False))
        if not is_here:
            files.removed(where)
        # Below the copy may be what the program has put there before it trained.
        if is_here or files.is_new(where):
            original(path, dir_fd=dir_fd)

    return remove


def _renames(files: UserFiles, original: Any) -> Any:
    def rename(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = files.path_of(src, src_dir_fd), files.path_of(dst, dst_dir_fd)
        if files.has_copy(source):
            _real_replace(files.copy_of(source), files.new_copy(target))
            files.removed(source)
            if files.is_new(source) and not _is_there(source, as_folder=True):
                _real_unlink(source)
        elif files.holds_old(source):
            files.removed(source)
        elif files.has_copy(target) or (files.is_old(target, follow=False) and not os.path.isdir(target)):
            shutil.move(source, files.new_copy(target))
        else:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    return rename


def _makes(files: UserFiles, original: Any) -> Any:
    def make(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(path, *args, **kwargs)
        except FileExistsError:
            # What was there before is still there.
            where = files.path_of(path, kwargs.get("dir_fd"))
            if not files.was_removed(where):
                raise
            if _is_there(where, as_folder=True):
                files.made_again(where)

    return make


def _makes_link(files: UserFiles, original: Any) -> Any:
    def symlink(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        where = files.path_of(dst, kwargs.get("dir_fd"))
        named = os.path.join(os.path.dirname(where), os.fsdecode(src))
        if files.has_copy(files.path_of(named)) or files.was_removed(where):
            original(files.seen(named), files.new_copy(where))
        else:
            original(src, dst, *args, **kwargs)

    return symlink


def _links(files: UserFiles, original: Any) -> Any:
    def link(src: Any, dst: Any, **kwargs: Any) -> None:
        source = files.path_of(src, kwargs.get("src_dir_fd"))
        if files.has_copy(source) or files.is_old(source):
            # A link would count as a change of the file, and let it be changed by another name.
            shutil.copy2(files.seen(source), files.path_of(dst, kwargs.get("dst_dir_fd")))
        else:
            original(src, dst, **kwargs)

    return link


def _touches(files: UserFiles, original: Any) -> Any:
    def touch(path: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(path, int):
            original(path, *args, **kwargs)
            return
        where = files.path_of(path, kwargs.get("dir_fd"))
        if files.has_copy(where):
            original(files.copy_of(where), *args, **kwargs)
        elif not files.is_old(where):
            original(path, *args, **kwargs)

    return touch


def _truncates(files: UserFiles, original: Any) -> Any:
    def truncate(path: Any, length: int) -> None:
        original(files.to_write(path, keeps=True), length)

    return truncate


_STAND_INS: dict[str, Callable[[UserFiles, Any], Any]] = {
    "open": _os_open,
    "stat": _looks,
    "lstat": _looks,
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
    "utime": _touches,
    "chmod": _touches,
    "chown": _touches,
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
            if not _is_there(where):
                return
        if sys.version_info >= (3, 11):
            original(path, *args, dir_fd=dir_fd, **kwargs)
        else:
            original(path, *args, **kwargs)

    stand_in("rmtree", original, rmtree)
