"""A trial leaves the user's files as they are: by the layer that it runs on, or by replaced functions."""

# What is called for every file that a program opens takes paths as text.
# ruff: noqa: PTH100, PTH112, PTH115, PTH117, PTH118, PTH120

import builtins
import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.folders import Layer, caches, is_opaque

_real_stat, _real_lstat, _real_access = os.stat, os.lstat, os.access
_real_listdir, _real_makedirs = os.listdir, os.makedirs
_real_open, _real_unlink = builtins.open, os.unlink


class UserFiles:
    """The user's protected files, and the paths of their copies."""

    def __init__(
        self,
        scratch: Path,  # the trial's folder for redirected changes
        protected_before: float,  # seconds since the epoch; older files are protected
        folder: Path,
        layered_device: int | None,  # the number of the trial's own file system; None if it has none
        hidden: Iterable[str] = (),  # ZeroTune's folders, which no listing shows and which nothing removes
        records: Iterable[Path] = (),  # the folders among them that the rank writes to
    ) -> None:
        self._copies = str(scratch / "files")
        self._layered_device = layered_device
        self._before = protected_before
        self._removed: set[str] = set()
        self.is_training = False  # an optimizer step was taken; what is saved from then on is no preparation
        self.filled: set[str] = set()  # folders of the layer with older files, into which the program has saved
        self._hidden = {root for place in hidden for root in _spellings(place)}
        self._with_hidden = {os.path.dirname(root) for root in self._hidden}
        self._within_hidden = tuple(root + os.sep for root in self._hidden)
        free = ["/dev", "/proc", "/sys", "/tmp", "/var/tmp", tempfile.gettempdir(), *caches(os.environ)]
        roots = {f"{root}{os.sep}": True for place in free for root in _spellings(place)}
        roots.update({f"{root}{os.sep}": False for place in (folder, *self._hidden) for root in _spellings(place)})
        roots.update({f"{root}{os.sep}": True for place in (scratch.parent, *records) for root in _spellings(place)})
        # The deepest folder decides.
        self._roots = sorted(roots.items(), key=lambda root: -len(root[0]))

    def start_over(self) -> None:
        """Forgets what the program has written and removed, as it is run again. No other rank may run it meanwhile."""
        shutil.rmtree(self._copies, ignore_errors=True)
        self._removed.clear()
        self.filled.clear()
        self.is_training = False

    def training_began(self) -> None:
        self.is_training = True

    def is_free(self, where: str) -> bool:
        return next((is_free for root, is_free in self._roots if where.startswith(root)), False)

    def is_layered(self, where: str) -> bool:
        if self._layered_device is None:
            return False
        while not _exists(where) and where != os.sep:
            where = os.path.dirname(where)
        return _real_stat(where).st_dev == self._layered_device

    def path_of(self, path: Any, dir_fd: int | None = None) -> str:
        """An absolute path as text. The given path may be relative to an open folder."""
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text)

    def copy_of(self, where: str) -> str:
        return self._copies + where

    def is_hidden(self, where: str) -> bool:
        """Whether a path is a folder of ZeroTune's that no listing shows."""
        return where in self._hidden

    def has_hidden(self, folder: str) -> bool:
        return folder in self._with_hidden

    @property
    def has_changes(self) -> bool:
        """Whether the program sees any file differently from the disk."""
        return bool(self._removed) or _exists(self._copies)

    def has_copy(self, where: str) -> bool:
        return _exists(self._copies) and _exists(self._copies + where)

    def seen(self, path: Any, dir_fd: int | None = None) -> Any:
        """The path to read: the copy if there is one, else the path itself."""
        if isinstance(path, int) or not self.has_changes:
            return path
        where = self.path_of(path, dir_fd)
        if _exists(self._copies + where):
            return self._copies + where
        if self.was_removed(where):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path

    def is_old(self, where: str, follow: bool = True) -> bool:
        """Whether a path is older than the study, and has to stay as it is."""
        try:
            found = _real_stat(where) if follow else _real_lstat(where)
        except (OSError, ValueError):
            return False
        is_file = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)
        is_before = found.st_ctime < self._before or where in self._hidden or where.startswith(self._within_hidden)
        return is_file and is_before and found.st_dev != self._layered_device and not self.is_free(where)

    def to_prepare(self, folder: str | os.PathLike[str]) -> str | os.PathLike[str] | None:
        """The folder into which the program may still save; None if it may not.

        It may while it prepares. A folder may hold something older than the study, such as a model that the user has
        trained. Then only a layer takes the save, because some libraries write past Python.
        """
        if self.is_training:
            return None
        where = os.path.realpath(self.path_of(folder))
        if not self._lists_old(where):
            return folder
        if not self.is_layered(where):
            return None
        self.filled.add(where)
        return folder

    def to_prepare_model(self, folder: str | os.PathLike[str]) -> str | os.PathLike[str] | None:
        """As `to_prepare`, for a model. Without a layer, the trial's copies take it, and the program reads it there."""
        where = self.to_prepare(folder)
        if where is not None or self.is_training or self.is_free(self.path_of(folder)):
            return where
        return self.new_copy(self.path_of(folder))

    def _lists_old(self, folder: str) -> bool:
        try:
            names = _real_listdir(folder)
        except (OSError, ValueError):
            return False
        return any(self._was_before(os.path.join(folder, name)) for name in names)

    def _was_before(self, where: str) -> bool:
        for look in (_real_lstat, _real_stat):
            # A link may lead nowhere, and another rank may remove a file meanwhile.
            with contextlib.suppress(OSError):
                if look(where).st_ctime < self._before:
                    return True
        return False

    def is_new(self, where: str) -> bool:
        return is_there(where) and not self.is_old(where, follow=False)

    def holds_old(self, where: str) -> bool:
        if self.is_old(where, follow=False):
            return True
        if self.is_free(where) or not is_there(where, as_folder=True):
            return False
        return any(self.holds_old(os.path.join(where, name)) for name in _real_listdir(where))

    def removed(self, where: str) -> None:
        """Records that the program has removed a path, with everything below it."""
        copy = self.copy_of(where)
        if os.path.isdir(copy):
            shutil.rmtree(copy, ignore_errors=True)
        elif _exists(copy):
            _real_unlink(copy)
        self._removed.add(where)

    def was_removed(self, where: str) -> bool:
        is_below = any(where == path or where.startswith(path + os.sep) for path in self._removed)
        return is_below and self.is_old(where, follow=False)

    def made_again(self, where: str) -> None:
        """Records that the program has made a removed folder again. Its old content stays removed."""
        self._removed.discard(where)
        self._removed.update(os.path.join(where, name) for name in _real_listdir(where))

    def new_copy(self, where: str) -> str:
        """Makes the folder of a path's copy. The caller writes the content."""
        copy = self.copy_of(where)
        _real_makedirs(os.path.dirname(copy), exist_ok=True)
        return copy

    def to_write(self, path: Any, keeps: bool, creates: bool = False, dir_fd: int | None = None) -> Any:
        """The path to write in place of a path, which may be relative to the open folder `dir_fd`.

        `keeps`: the content stays at first, because the program appends to it or changes a part. `creates`: an existing
        file is an error.
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
    # This is called at every `open`, and is several times faster than an `os.stat` that fails.
    return "\0" not in path and _real_access(path, os.F_OK)


def is_there(path: str, as_folder: bool = False) -> bool:
    """Whether a file, a link or a folder really exists at a path."""
    try:
        found = _real_lstat(path)
    except (OSError, ValueError):
        return False
    return not as_folder or stat.S_ISDIR(found.st_mode)


def _copy_once(original: str, copy: str) -> None:
    # Copies a whole file, once for all the ranks that may copy it at the same time.
    aside = f"{copy}.{os.getpid()}"
    with _real_open(original, "rb") as source, _real_open(aside, "wb") as target:
        shutil.copyfileobj(source, target)
    try:
        os.link(aside, copy)
    except FileExistsError:
        pass
    finally:
        _real_unlink(aside)


# A rank that sees the program's folder through a layer (`zerotune.trial_lib.launch.trial_files`)


class LayeredFiles:
    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._folder = Path(layer.folder)
        hidden = map(Path, layer.hidden)
        self._hidden = {str(path.relative_to(self._folder)) for path in hidden if self._folder in path.parents}
        self.device = self._folder.stat().st_dev  # the number of the layer's file system, which every file in it has

    def note_prepared(self, filled: Container[str]) -> None:
        """Records all new files when the program begins to train. One rank calls it.

        Filled folders have a model of the user's, into which the program has saved. New files beside the model would
        change how it loads, so they are no preparation.
        """
        beside = (path for path in self._new() if not self._is_folder(path))
        left_out = {path for path in beside if str((self._folder / path).parent) in filled}
        self._layer.note_prepared(path for path in self._new() if path not in left_out)

    def go_back(self) -> None:
        """Restores the files that the program found when it began to train. One rank calls it while no program runs."""
        self._restore(self._layer.noted() or set(), "")

    def _new(self, below: str = "") -> Iterator[str]:
        # The files that only the layer has, relative to the folder.
        for name in os.listdir(self._layer.upper / below):  # noqa: PTH208 - names, relative to both folders
            path = str(Path(below, name))
            if path in self._hidden:
                continue
            if not os.path.lexists(self._layer.below / path):
                yield path
                if self._is_folder(path):
                    for folder, folders, files in os.walk(self._layer.upper / path):
                        yield from (
                            str(Path(folder, each).relative_to(self._layer.upper)) for each in (*folders, *files)
                        )
            elif self._is_changed_folder(path):
                yield from self._new(path)

    def _is_folder(self, path: str) -> bool:
        return (self._layer.upper / path).is_dir() and not (self._layer.upper / path).is_symlink()

    def _is_changed_folder(self, path: str) -> bool:
        original = self._layer.below / path
        is_folder = self._is_folder(path) and original.is_dir() and not original.is_symlink()
        return is_folder and not is_opaque(str(self._layer.upper / path))

    def _restore(self, prepared: set[str], below: str) -> None:
        for name in os.listdir(self._layer.upper / below):  # noqa: PTH208 - names, relative to both folders
            path = str(Path(below, name))
            if path in self._hidden:
                continue
            if path in prepared:
                if self._is_folder(path):
                    self._restore(prepared, path)
            elif self._is_changed_folder(path):
                self._restore(prepared, path)
            else:
                _remove(self._folder / path)
                _copy(self._layer.below / path, self._folder / path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy(original: Path, path: Path) -> None:
    if original.is_dir() and not original.is_symlink():
        shutil.copytree(original, path, symlinks=True)
    elif os.path.lexists(original):
        shutil.copy2(original, path, follow_symlinks=False)
