"""The prepared files of a rank that sees the program's folder through a layer (`trial_lib.launch.trial_files`).

Both functions look at the layer from outside, and do not change it. Changes go through the folder that the program
sees.
"""

import os
import shutil
from collections.abc import Container, Iterator
from pathlib import Path

from trial_lib.wire.layer import Layer, is_opaque


class LayeredFiles:
    """The layer of a trial.

    Args:
        layer: a mounted layer.

    Attributes:
        device: the number of the layer's file system. Every file in the layer has it.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._folder = Path(layer.folder)
        hidden = map(Path, layer.hidden)
        self._hidden = {str(path.relative_to(self._folder)) for path in hidden if self._folder in path.parents}
        self.device = self._folder.stat().st_dev

    def note_prepared(self, filled: Container[str]) -> None:
        """Records all new files when the program begins to train. One rank calls it.

        Args:
            filled: folders with a model of the user's, into which the program has saved. New files beside the model
                would change how it loads, so they are no preparation.
        """
        beside = (path for path in self._new() if not self._is_folder(path))
        left_out = {path for path in beside if str((self._folder / path).parent) in filled}
        self._layer.note_prepared(path for path in self._new() if path not in left_out)

    def go_back(self) -> None:
        """Restores the files that the program found when it began to train. One rank calls it while no program runs."""
        self._restore(self._layer.noted() or set(), "")

    def _new(self, below: str = "") -> Iterator[str]:
        """Yields the files that only the layer has, relative to the folder."""
        for name in os.listdir(self._layer.upper / below):  # noqa: PTH208 - names, relative to both folders
            path = str(Path(below, name))
            if path in self._hidden:
                continue
            if not os.path.lexists(self._layer.below / path):
                yield path
                if self._is_folder(path):
                    yield from self._all_within(path)
            elif self._is_changed_folder(path):
                yield from self._new(path)

    def _all_within(self, below: str) -> Iterator[str]:
        for folder, folders, files in os.walk(self._layer.upper / below):
            for name in (*folders, *files):
                yield str(Path(folder, name).relative_to(self._layer.upper))

    def _is_folder(self, path: str) -> bool:
        return (self._layer.upper / path).is_dir() and not (self._layer.upper / path).is_symlink()

    def _is_changed_folder(self, path: str) -> bool:
        """Returns whether a path is the same folder in the layer and below it."""
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
