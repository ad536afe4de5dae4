"""`zerotune apply`: it writes a study's answer into the files that the user's command names, into all or into none."""

import codecs
import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import click

from zerotune.flows.terminal import say
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded, sync_folder
from zerotune.trial_lib.records.folders import OwnCommand, StudyPaths
from zerotune.trial_lib.study.folder import find_study
from zerotune.trial_lib.study.followed import joined


def apply_command(study: str | None, backup: bool) -> int:
    """`study` is as in `zerotune show`. With `backup` each file that changes is kept beside itself.

    Raises InputError: the study has no edits for files, a file is not as the study has seen it, or one cannot be
    written. All files are as they were then.
    """
    paths = StudyPaths(find_study(study, Path.cwd()))
    own = OwnCommand.of(paths)
    if own is None:
        raise InputError(
            "this study's answer is no edit of your files.",
            where=str(paths.root),
            remedy=f"Train with sh {paths.best_command}, if it is there: it says what to change.",
        )
    # A link stays, and its file is written.
    changes = {Path(change.path).resolve(): change for change in own.changes}
    if len(changes) < len(own.changes):
        names = ", ".join(change.path for change in own.changes)
        raise InputError("some of these files are one.", where=names, remedy="Make the changes of the diff by hand.")
    for path, change in changes.items():
        _refuse_other(path, change.before, change.after, backup)
    _write_all({path: change.after for path, change in changes.items()}, backup)
    if own.diff:
        click.echo(own.diff)
    say(f"Train with it: {joined([*(f'{name}={value}' for name, value in own.variables.items()), *own.applied])}")
    return 0


def _write_all(texts: dict[Path, str], backup: bool) -> None:
    # First every text lies beside its file, on the disk. Then only renaming is left, which is taken back if it fails.
    with contextlib.ExitStack() as beside, contextlib.ExitStack() as undo:
        try:
            staged: dict[Path, Path] = {}
            for at, text in texts.items():
                staged[at] = _staged(at, text, beside)
            for at, new in staged.items():
                if at.exists():
                    kept = _backup(at) if backup else new.with_name(f"{new.name}.before")
                    (undo if backup else beside).callback(kept.unlink, missing_ok=True)
                    _keep(at, kept)
                    undo.callback(os.replace, kept, at)
                else:
                    undo.callback(at.unlink, missing_ok=True)
                new.replace(at)
                sync_folder(at.parent)
        except OSError as error:
            raise InputError(
                f"it cannot be written: {error.strerror}. No file has changed.",
                where=str(at),
                remedy="Make the file and its folder writable, or room on the disk, and type it again.",
            ) from error
        undo.pop_all()


def _staged(path: Path, text: str, beside: contextlib.ExitStack) -> Path:
    # A file beside another with its new text, its mode and its owner. The stack removes it.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    beside.callback(Path(name).unlink, missing_ok=True)
    mark, mode = b"", 0o644
    with os.fdopen(descriptor, "wb") as file:
        if path.exists():
            found = path.stat()
            if not os.access(path, os.W_OK) or not found.st_mode & 0o222:
                raise PermissionError(errno.EACCES, "it is read-only")
            mode = found.st_mode & 0o7777
            mark = codecs.BOM_UTF8 if path.read_bytes().startswith(codecs.BOM_UTF8) else b""
            with contextlib.suppress(OSError):
                os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, mode)
        file.write(mark + text.encode())
        file.flush()
        os.fsync(descriptor)
    return Path(name)


def _keep(path: Path, kept: Path) -> None:
    try:
        os.link(path, kept)
    except OSError:
        # Some file systems have no second name for a file.
        shutil.copy2(path, kept)


def _backup(path: Path) -> Path:
    return path.with_name(f"{path.name}.before-zerotune")


def _refuse_other(path: Path, before: str | None, after: str, backup: bool) -> None:
    try:
        now = read_bounded(path) if path.exists() else None
    except (OSError, ValueError):
        now = ""
    if now != before:
        what = "has the answer already" if now == after else "has changed since the study began"
        raise InputError(f"this file {what}.", where=str(path), remedy="Make the changes of its diff by hand, if any.")
    if backup and before is not None and _backup(path).exists():
        raise InputError("this backup is there already.", where=str(_backup(path)), remedy="Move it away.")
