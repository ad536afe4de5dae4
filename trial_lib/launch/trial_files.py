"""The rule for the files of the program's folder in a trial: a layer over it, and what is kept of the layer.

A trial changes nothing of the user's. There are two ways, and the trial's record names the one that it used:

* *layered*: the ranks see the program's folder through a layer of their own (`layer_mount`). It works for any writer,
  such as SQLite, Arrow or another program, and all ranks see what one of them writes.
* *intercepted*: Python's functions are replaced in each rank (`zerotune.trial_lib.rank.user_files`). This needs nothing
  from the host, but covers less. It is also used for paths outside of the layer.

The program does not see ZeroTune's own folders. In a layer they are absent. The trial's processes find its records
under a temporary folder, and the guard changes the paths of the launch accordingly.

The layer covers the program's folder, or the checkout that contains it, and no more. Its contents are on the file
system of the study's folder, which may have no room for a data set that the program prepares elsewhere. There is no
layer if the two folders are on different file systems. There is none for a trial over several hosts either, because
ranks with a hostfile have to find each other's files.

New files that exist at the first optimizer step are the program's preparation. When the trial has ended, they are moved
to their place, each folder at once, and the next trial finds them. A trial that ends before its first step leaves
nothing half prepared. Later files are the training's output. They are removed with the layer, as are changes of older
files. So no trial resumes from the checkpoint of another.
"""

import contextlib
import itertools
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerotune.trial_lib.launch.processes import bootstrap
from zerotune.trial_lib.launch.processes.layer_mount import may_mount, mounts_within
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.messages.folders import Layer, home_folder, read_layer, store_of
from zerotune.trial_lib.records.folders import ARTIFACTS, OWN_FOLDERS, STORE, StudyPaths

_LONGEST_PATH = 4096
_LAYER_S = 60.0  # a file system that does not answer must not keep a study from its beginning


def layer_for(program: Program, scratch: Path, records: Sequence[Path]) -> Layer | None:
    """The layer for a trial, whose scratch folder exists; None if it has none. Its processes write to `records`."""
    folder = _checkout(program.model_dir.resolve())
    if folder == Path(folder.anchor) or folder.stat().st_dev != scratch.stat().st_dev:
        return None
    hidden = hidden_folders(program.model_dir, records)
    return Layer(
        str(folder),
        str(store_of(scratch.resolve())),
        records=tuple(map(str, _outermost(records))),
        hidden=tuple(map(str, hidden)),
        # Each is shown once, because what is shown cannot be changed.
        named=tuple(map(str, _outermost(list(_named(program, hidden, records))))),
    )


def hidden_folders(model_dir: Path, records: Sequence[Path]) -> list[Path]:
    """ZeroTune's folders that a program does not see: in its folder, in its checkout, and above the records."""
    model_dir, records = model_dir.resolve(), [record.resolve() for record in records]
    # A study may have been moved to a folder of any name.
    study = StudyPaths(records[0].parent.parent)
    places = [model_dir, *model_dir.parents, *records[0].parents]
    found = [study.root] if study.record.exists() else []
    for place in dict.fromkeys(places):
        if own := [place / name for name in OWN_FOLDERS if _leads_to_folder(place / name)]:
            # MLflow may make its files while a trial runs.
            found += [*own, place / STORE, place / f"{STORE}-journal", place / ARTIFACTS]
    return _outermost([*records, *(folder for folder in found if not model_dir.is_relative_to(folder))])


def _outermost(folders: Sequence[Path]) -> list[Path]:
    return [each for each in dict.fromkeys(folders) if set(folders).isdisjoint(each.parents)]


def _is_within(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _named(program: Program, hidden: Sequence[Path], records: Sequence[Path]) -> Iterator[Path]:
    for word in (*program.arguments, *program.target.values(), *program.files):
        path = program.model_dir / word.rpartition("=")[2]
        if len(word) < _LONGEST_PATH and os.path.lexists(path):
            path = path.resolve()
            if _is_within(path.parent, hidden) and not any(path.is_relative_to(record.resolve()) for record in records):
                yield path


def _checkout(folder: Path) -> Path:
    # Returns the checkout that contains a folder, or the folder. Programs write beside their scripts too. Of a
    # submodule or a worktree it is the checkout around it that has git's files.
    home = home_folder().resolve()
    parents = itertools.takewhile(lambda parent: parent != home, (folder, *folder.parents))
    checkouts = [parent for parent in parents if (parent / ".git").exists()] or [folder]
    return next((each for each in checkouts if _git_files(checkouts[0]).is_relative_to(each)), checkouts[0])


def _git_files(checkout: Path) -> Path:
    git = checkout / ".git"
    # A submodule and a worktree have a file with the path.
    return (checkout / (git.read_text().partition("gitdir:")[2].strip() if git.is_file() else git)).resolve()


def _led_out(folder: Path, model_dir: Path) -> Iterator[tuple[Path, Path]]:
    for place in dict.fromkeys((folder, model_dir)):
        # A checkout may have a folder above that this user cannot list.
        for link in sorted(place.iterdir()) if os.access(place, os.R_OK | os.X_OK) else ():
            target = Path(os.path.realpath(link))
            if link.is_symlink() and _leads_to_folder(link) and not target.is_relative_to(folder):
                yield link, target
    if (folder / ".git").is_file() and not (git := _git_files(folder)).is_relative_to(folder):
        yield folder / ".git", git


def _leads_to_folder(path: Path) -> bool:
    # Path's own raises for a link to a place that this user may not enter.
    return os.path.isdir(path)  # noqa: PTH112


def layer_refusal(folder: Path) -> str | None:
    """Returns the kernel's reason for no layer over a folder on this host. None if a layer works."""
    tried = Path(tempfile.mkdtemp(dir=folder))
    command = bootstrap.command(sys.executable, "zerotune.trial_lib.launch.processes.layer_mount", str(tried))
    try:
        # In a session of its own. A terminal's Ctrl-C would end it, and say nothing about the kernel.
        said = subprocess.run(
            command, capture_output=True, text=True, check=False, start_new_session=True, timeout=_LAYER_S
        )
    except subprocess.TimeoutExpired:
        return f"one was not made within {_LAYER_S:.0f} s"
    finally:
        _remove_store(tried / "store")
        shutil.rmtree(tried, ignore_errors=True)
    # Of a traceback, the last line is the reason.
    return (said.stdout.strip() or said.stderr.strip()).rpartition("\n")[2] or None


def uncovered(model_dir: Path, study: Path, over_hosts: bool) -> str:
    """Returns a sentence on the files that a study's trials do not keep from every writer; empty if on none."""
    folder = _checkout(model_dir.resolve())
    if over_hosts:
        reason = "trials of several hosts have no layers"
    elif folder == Path(folder.anchor):
        reason = "it is the root of the file system"
    elif folder.stat().st_dev != study.stat().st_dev:
        reason = f"{study} is on another file system"
    elif refusal := layer_refusal(study):
        reason = f"this host has no layers: {refusal}"
    elif (mounts := mounts_within(str(folder), Path("/proc/self/mountinfo").read_bytes())) and not may_mount():
        # The kernel would have to show what lies under the mounted one, which a user may not see.
        reason = f"{mounts[0]} is mounted in it, so only root can make a layer over it"
    else:
        hidden = hidden_folders(model_dir, [StudyPaths(study).trial(0).root])
        parts = dict.fromkeys(map(Path, mounts), "it is a file system of its own")
        parts.update({target: f"{link} leads there" for link, target in _led_out(folder, model_dir.resolve())})
        seen = [f"{part} itself ({why})" for part, why in parts.items() if not _is_within(part, hidden)]
        return f"Trials see {', '.join(seen)}. {UNCOVERED}" if seen else ""
    return f"{_beginning(folder)}{reason}). {UNCOVERED}"


def uncovered_after_all(model_dir: Path, notes: Sequence[str]) -> str:
    """Returns a sentence for a trial whose layer the kernel refused; empty if its study's notes foresaw it."""
    # A note on a link or a disk says nothing of the folder itself.
    if any(note.startswith(_beginning(_checkout(model_dir.resolve()))) for note in notes):
        return ""
    return f"The kernel made no layer over the program's folder. {UNCOVERED}"


def _beginning(folder: Path) -> str:
    return f"Trials see {folder} itself ("


UNCOVERED = (
    "There only Python's own functions leave your files alone. What your program starts (find, git, rm) or calls past "
    "Python may change or remove them for good."
)


def put_away(scratch: Path) -> None:
    """Keeps the preparation of a trial and removes the rest, when its last process has ended."""
    layer = read_layer(scratch)
    # The disk is full, or a folder is gone. The next trial prepares again.
    with contextlib.suppress(OSError):
        if layer is not None and (prepared := layer.noted()):
            _keep(layer, prepared)
    remove(scratch)


def remove(scratch: Path) -> None:
    """Removes everything that a trial's program has written into its layer."""
    _remove_store(store_of(scratch))
    shutil.rmtree(scratch, ignore_errors=True)


def _remove_store(store: Path) -> None:
    # Only root can read the kernel's folder.
    with contextlib.suppress(OSError):
        (store / "work" / "work").chmod(stat.S_IRWXU)
    shutil.rmtree(store, ignore_errors=True)


def _keep(layer: Layer, prepared: set[str], below: str = "") -> None:
    # Moves the preparation to its place, unless another trial was first.
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
    # Removes the files that came into a prepared folder after training began, and the kernel's marks.
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
