"""`zerotune apply`: it writes a study's answer into the files that the user's command names."""

import codecs
import contextlib
import os
import shutil
from pathlib import Path

import click

from zerotune.flows.terminal import say
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded, write_whole
from zerotune.trial_lib.records.folders import OwnCommand, StudyPaths
from zerotune.trial_lib.study.folder import find_study
from zerotune.trial_lib.study.followed import joined


def apply_command(study: str | None, backup: bool) -> int:
    """`study` is as in `zerotune show`. With `backup` each file that changes is kept beside itself.

    Raises InputError: the study has no edits for files, or a file is not as the study has seen it. No file is written
    then.
    """
    paths = StudyPaths(find_study(study, Path.cwd()))
    own = OwnCommand.of(paths)
    if own is None:
        raise InputError(
            "this study's answer is no edit of your files.",
            where=str(paths.root),
            remedy=f"Train with sh {paths.best_command}, if it is there: it says what to change.",
        )
    for change in own.changes:
        _refuse_other(Path(change.path), change.before, change.after, backup)
    for change in own.changes:
        path = Path(change.path)
        if change.before is None:
            write_whole(path, change.after, mode=0o644)
            continue
        raw, stat = path.read_bytes(), path.stat()
        if backup:
            shutil.copy2(path, _backup(path))
        mark = "\ufeff" if raw.startswith(codecs.BOM_UTF8) else ""
        write_whole(path, mark + change.after, mode=stat.st_mode & 0o7777)
        with contextlib.suppress(OSError):
            os.chown(path, stat.st_uid, stat.st_gid)
    if own.diff:
        click.echo(own.diff)
    say(f"Train with it: {joined([*(f'{name}={value}' for name, value in own.variables.items()), *own.applied])}")
    return 0


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
