"""What the trials of a study may do with the program's folder: a layer for each, and what is kept of it.

A trial changes nothing of the user's. Two ways lead there, and the trial's record says which it was:

* *layered*: the ranks see the program's folder through a layer of their own (`layer_mount`), whatever they write with:
  SQLite, Arrow or another program that they start find there what any of them has written.
* *intercepted*: Python's own functions are replaced in each rank (`trial_lib.leave_alone.user_files`). It needs nothing
  of the host, sees less, and is used besides for whatever lies outside the layer.

The layer is over the program's own folder, or the checkout that it is in, and not over more: what a program writes goes
to the file system of the study's folder, and a data set that is prepared elsewhere may find no room there. So there
is none where the two are on different file systems, nor for a trial that spans hosts, whose ranks have to find each
other's files.

New files that the program had when it took its first optimizer step are its preparation. They are moved to where it
has put them when the trial has ended, a folder at once, and the next trial finds them; a trial that never came to
train leaves nothing half prepared. What is new since then is the training's output. It goes with the layer, as do
changes of what was there before: no trial resumes from the checkpoint of another.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trial_lib.launch.processes import bootstrap
from trial_lib.records.study_folder import TrialPaths
from trial_lib.wire.layer import Layer, caches, home_folder, read_layer, store_of


def layer_for(model_dir: Path, paths: TrialPaths, environment: Mapping[str, str]) -> Layer | None:
    """Returns the layer to ask for; None where there is to be none.

    Args:
        model_dir: the program's own folder.
        paths: of the trial; its scratch folder is there.
        environment: of its ranks.
    """
    folder, scratch = _checkout(model_dir.resolve()), paths.scratch.resolve()
    records = paths.root.parent.resolve()
    # What is written among the records has to stay; nothing of a folder that holds them directly could be a layer.
    if folder in (Path(folder.anchor), records) or folder.stat().st_dev != scratch.stat().st_dev:
        return None
    # A sweep's trials share one layer: all records of the study are written as they are.
    kept = [records, *(path.resolve() for path in caches(environment))]
    through = tuple(str(path) for path in kept if folder in path.parents)
    return Layer(str(folder), str(store_of(scratch)), through)


def _checkout(folder: Path) -> Path:
    """Returns the checkout that a folder is in: programs write beside their scripts, too; without one, the folder."""
    home = home_folder().resolve()
    for parent in (folder, *folder.parents):
        if parent == home:
            break
        if (parent / ".git").exists():
            return parent
    return folder


def layer_refusal(folder: Path) -> str | None:
    """Returns why this host puts no layer over what is in a folder, in the kernel's words; None where it does."""
    with _emptied(Path(tempfile.mkdtemp(dir=folder))) as tried:
        command = bootstrap.command(sys.executable, "trial_lib.launch.processes.layer_mount", str(tried))
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip() or said.stderr.strip() or None


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    try:
        yield folder
    finally:
        _remove_store(folder / "store")
        shutil.rmtree(folder, ignore_errors=True)


def put_away(scratch: Path) -> None:
    """Keeps what a trial has prepared and removes the rest, when the last of its processes has ended.

    Args:
        scratch: the trial's folder for what its program has written.
    """
    layer = read_layer(scratch)
    # A disk that is full, or a folder that is gone: the next trial prepares again.
    with contextlib.suppress(OSError):
        if layer is not None and (prepared := layer.noted()):
            _keep(layer, prepared)
    remove(scratch)


def remove(scratch: Path) -> None:
    """Removes all that a trial's program has written in the place of the user's files."""
    _remove_store(store_of(scratch))
    shutil.rmtree(scratch, ignore_errors=True)


def _remove_store(store: Path) -> None:
    # The kernel's own folder can be read by nobody but root.
    with contextlib.suppress(OSError):
        (store / "work" / "work").chmod(stat.S_IRWXU)
    shutil.rmtree(store, ignore_errors=True)


def _keep(layer: Layer, prepared: set[str], below: str = "") -> None:
    """Moves what is prepared to where the program has put it, unless another trial has been first."""
    for name in os.listdir(layer.upper / below):  # noqa: PTH208 - names, relative to both folders
        path = os.path.join(below, name)  # noqa: PTH118 - as the ranks have listed it
        source, target = layer.upper / path, Path(layer.folder) / path
        if path in prepared:
            if not os.path.lexists(target):
                _forget_later(source, path, prepared)
                source.rename(target)
        elif _is_folder(source) and _is_folder(target):
            _keep(layer, prepared, path)


def _forget_later(source: Path, path: str, prepared: set[str]) -> None:
    """Removes what has come into a prepared folder since the training began, and the kernel's notes."""
    for name in os.listxattr(source, follow_symlinks=False):
        if ".overlay." in name:
            os.removexattr(source, name, follow_symlinks=False)
    if not _is_folder(source):
        return
    for entry in list(source.iterdir()):
        below = os.path.join(path, entry.name)  # noqa: PTH118 - as the ranks have listed it
        if below in prepared:
            _forget_later(entry, below, prepared)
        elif _is_folder(entry):
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
