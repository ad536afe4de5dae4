"""The common part of the folders of studies and full experiments, and the checks before there is one."""

import contextlib
import errno
import getpass
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import OWNERS_FILE, OWNERS_FOLDER, make_own_folder, open_own, write_whole
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.folders import (
    STUDIES,
    DrivenFolder,
    RunRecord,
    StudyPaths,
    StudyRecord,
    Whereabouts,
    whereabouts_of,
)
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import bytes_shown

# A copy of a folder is a study of its own.

_RunT = TypeVar("_RunT", bound=RunRecord)

_DIGITS = 6


def with_own_id(record: _RunT, file: Path, resumes: bool) -> tuple[_RunT, str]:
    """A folder's record with its own id, and a note for the user that is empty if the folder is no copy.

    The record of a copy has another id, and no flow run; the caller writes it. If the work will not be resumed, it is
    sent to MLflow as it is.
    """
    kept, own_id = record.whereabouts, record.id
    if kept is None or not is_copy(kept, file, own_id, resumes):
        return record, ""
    now = whereabouts_of(file.parent)
    # Another copy of the original to this place gets the same id.
    new_id = f"{own_id}-{hashlib.sha256(f'{now.host}:{now.path}'.encode()).hexdigest()[:_DIGITS]}"
    changes = {record.id_field: new_id, "flow_run_id": None, "whereabouts": now}
    note = f"this folder is a copy of {own_id} ({kept.path} on {kept.host}), so it has runs of its own, as {new_id}."
    return record.model_copy(update=changes), note


def is_copy(kept: Whereabouts, file: Path, own_id: str, resumes: bool) -> bool:
    """Whether the folder of a record's file is a copy. `kept` says where it was when it was last opened."""
    now = whereabouts_of(file.parent)
    # A copy on another file system may have the original's number by chance.
    has_its_number = now.inode == kept.inode
    original = Path(kept.path)
    if _has_another(original, file, own_id):
        return not has_its_number or number_of(original) in (kept.inode, 0)
    return resumes and not has_its_number and now.host != kept.host


def _has_another(original: Path, file: Path, own_id: str) -> bool:
    try:
        if original.samefile(file.parent):
            return False
        text = (original / file.name).read_text(encoding="utf-8")
    except PermissionError:
        # The folder is another user's.
        return True
    except (OSError, ValueError):
        return False
    return json.dumps(own_id) in text


# The reason of an interrupted study or full experiment
INTERRUPTED = "interrupted"


class FinishedError(InputError):
    """Nothing of a study, or of a full experiment, is left to do."""


def begun_by(flow_run_id: str, records: Iterable[Path]) -> Path | None:
    """The folder that a Prefect flow run has begun, if any. A retried flow run resumes it."""
    for record in records:
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            begun = json.loads(record.read_text())
            if begun.get("flow_run_id") == flow_run_id and not _is_copy(begun, record):
                return record.parent
    return None


def _is_copy(begun: dict[str, Any], record: Path) -> bool:
    if begun.get("whereabouts") is None:
        return False
    own_id = begun.get("study_id") or begun.get("experiment_id", "")
    return is_copy(Whereabouts.model_validate(begun["whereabouts"]), record, own_id, resumes=False)


# The name of a folder may have 255 bytes, and files and runs are named after it.
_LONGEST_NAME = 100


def new_id(name: str) -> str:
    """A unique id for a study or full experiment of that name. It is a valid name of a folder."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "study"
    return f"{plain[:_LONGEST_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def provenance(model_dir: Path) -> dict[str, str]:
    """Who begins a run, and the commit of the code: fields of `RunRecord`."""
    found = {}
    with contextlib.suppress(OSError, KeyError):
        found["user"] = getpass.getuser()
    # Git is not needed for anything else. It may be missing, or refuse a folder of another user's.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(model_dir), "rev-parse", "HEAD"]
        found["git_commit"] = subprocess.run(
            words, capture_output=True, text=True, timeout=2, check=True
        ).stdout.strip()
    return found


def new_folder(path: Path, what: str, experiment: Experiment, whole: Path) -> None:
    """Makes a folder that keeps the experiment's YAML in the file `whole`. Raises InputError if it cannot be written.

    `path` is the folder, or one in it; folders above it are made as well. `what` is such as `study`, for messages.
    """
    try:
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER)
        keep_experiment(experiment, whole)
    except OSError as error:
        raise InputError(
            f"the {what}'s folder cannot be written ({error.strerror}).",
            where=str(whole.parent),
            remedy="Run zerotune in a folder that you may write to.",
        ) from None


def keep_experiment(experiment: Experiment, whole: Path) -> None:
    """Keeps the YAML, for this user alone, in a file that may exist and may be the submitted one."""
    if not whole.exists() or whole.read_text(encoding="utf-8") != experiment.text:
        write_whole(whole, experiment.text, mode=0o600)


class _LogFile(logging.FileHandler):
    def _open(self) -> Any:
        return open_own(Path(self.baseFilename), self.mode, encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves out a line that the disk has no room for. The study itself reports the full disk."""


def file_logger(name: str, path: Path) -> logging.Logger:
    """A logger that writes to a file. A command adds a handler to show it."""
    logger = logging.Logger(name, logging.DEBUG)
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return logger


def remove_folder(root: Path, log: logging.Logger) -> None:
    """Removes a study's folder with its log, and the folder of all studies if no other study is in it."""
    for handler in [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]:
        # Otherwise it would open its file again.
        log.removeHandler(handler)
        handler.close()
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def hold_lock(path: Path, what: str) -> FileLock:
    """The lock of a folder's one driver, held. Raises InputError if another process holds it."""
    lock = FileLock(path, mode=OWNERS_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another process drives this {what}.", where=str(path.parent), remedy="Wait for it, or stop it first."
        ) from None
    return lock


_RecordT = TypeVar("_RecordT", bound=BaseModel)


def read_own_text(path: Path, what: str, remedy: str) -> str:
    """The text of a file that ZeroTune has written, and that a person or a disk may have damaged since.

    `what` is such as `the study's record`. Raises FileNotFoundError if there is none, and InputError if it is no file,
    cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        sentence = f"{what} is damaged: not UTF-8 (byte {error.start})."
        raise InputError(sentence, where=str(path), remedy=remedy) from None
    except OSError as error:
        raise InputError(f"{what} cannot be read ({error.strerror}).", where=str(path), remedy=remedy) from None


def read_record_file(path: Path, model: type[_RecordT], what: str, remedy: str) -> _RecordT:
    """A record in such a file. Raises as `read_own_text` does, and InputError if it is of another version."""
    text = read_own_text(path, what, remedy)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise InputError(is_damaged(what, error), where=str(path), remedy=remedy) from None


def is_damaged(what: str, error: ValidationError) -> str:
    """The sentence on a record with mistakes."""
    count = error.error_count()
    return f"{what} is damaged or of another version ({count} mistake{'s' if count > 1 else ''})."


class TypedWrapper(FrozenRecord):
    """The words that the user typed, if they start the study's command."""

    words: tuple[str, ...] = ()


def write_wrapper(paths: DrivenFolder, words: tuple[str, ...]) -> None:
    """Writes the wrapper of a study or a full experiment, if it has one. Its words may have secrets."""
    if words:
        write_whole(paths.wrapper, TypedWrapper(words=words).model_dump_json(), mode=0o600)


def read_wrapper(paths: DrivenFolder) -> tuple[str, ...]:
    """The wrapper of a study or a full experiment; empty if it has none. Raises InputError if its file is damaged."""
    try:
        return read_record_file(paths.wrapper, TypedWrapper, "the typed command", "Start a new study.").words
    except FileNotFoundError:
        return ()


def read_record(paths: StudyPaths) -> StudyRecord:
    """A study's record. Raises InputError if the folder is not a study's, or its record is damaged."""
    return read_run_record(paths, StudyRecord)


def record_of(paths: StudyPaths) -> StudyRecord | None:
    """The record of a study; None if this version cannot read it."""
    with contextlib.suppress(OSError, InputError):
        return read_record(paths)
    return None


def read_run_record(paths: DrivenFolder, model: type[_RunT], remedy: str = "Restore the file.") -> _RunT:
    """The record of a study or a full experiment. Raises InputError as `read_record` does."""
    if not paths.record.is_file():
        raise InputError(
            f"this is not a {model.kind}'s folder: it has no {paths.record.name}.",
            where=str(paths.root),
            remedy=f"Name one of the folders in {model.folders}.",
        )
    return read_record_file(paths.record, model, f"the {model.kind}'s record", remedy)


def write_record(paths: DrivenFolder, record: RunRecord) -> None:
    """Writes a record for this user alone, because arguments, configuration and hyperparameters may hold secrets."""
    write_whole(paths.record, record.model_dump_json(indent=2), mode=0o600)


def as_kept(arguments: BaseModel) -> dict[str, Any]:
    """Arguments as a record keeps them: a run that is resumed may be in another working folder."""

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(whole, value))
        return value.absolute() if isinstance(value, Path) else value

    return arguments.model_copy(update={name: whole(value) for name, value in arguments}).model_dump(mode="json")


def find_study(named: str | None, work_dir: Path) -> Path:
    """The folder of a study. Raises InputError if there is none.

    `named` is its folder, its id, or the name of its experiment, whose newest study is meant. None is the newest study.
    """
    if named is not None and ("/" in named or (Path(named) / "study.json").is_file()):
        # Reading the study reports what its folder lacks.
        return Path(named)
    folder = work_dir / STUDIES
    records = [record for record in folder.glob("*/study.json") if record.is_file()]
    found = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    for record in found:
        if named in (None, record.parent.name) or named == getattr(record_of(StudyPaths(record.parent)), "name", None):
            return record.parent
    raise InputError(
        "there is no study." if named is None else "no study has this path, id or name.",
        where=str(folder) if named is None else named,
        remedy=f"Name a folder in {STUDIES}, or run zerotune where that is.",
    )


# ZeroTune's own folder: Prefect's database, the files of `zerotune up`, and operators without another place

_REMEDY = "Mend its permissions, or name another one by XDG_DATA_HOME."


def data_folder() -> Path:
    """ZeroTune's own folder, which may not exist yet. Its path is relative if there is no home folder."""
    try:
        return platformdirs.user_data_path("zerotune")
    except RuntimeError:
        return Path("~/.local/share/zerotune")


def require_data_folder(name: str) -> None:
    """Raises InputError if a folder of that name cannot be made and written in it. It leaves nothing."""
    folder = _in_data_folder(name)
    if not can_be_written(folder):
        nearest = _nearest(folder)
        why = "." if nearest.is_dir() else " (it is no folder)."
        raise InputError(f"it cannot be written{why}", where=str(nearest), remedy=_REMEDY)
    nearest = _nearest(folder)
    try:
        # Permissions do not show all. A kernel's own folder, or a host's that trusts no root, refuses what they allow.
        Path(tempfile.mkdtemp(dir=nearest, prefix=".zerotune-")).rmdir()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(nearest), remedy=_REMEDY) from None


def can_be_written(folder: Path) -> bool:
    nearest = _nearest(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _in_data_folder(name: str) -> Path:
    folder = data_folder() / name
    if not folder.is_absolute():
        raise InputError(
            "there is no home folder: the variable is not set, and this user is not in the password database.",
            where="HOME",
            remedy="Set it, or XDG_DATA_HOME, to a folder that you may write to.",
        )
    return folder


def made_in_data_folder(name: str) -> Path:
    """A folder in it, which only its owner may enter, made if it does not exist. Raises InputError if that fails."""
    folder = _in_data_folder(name)
    try:
        make_own_folder(folder)
        # Earlier versions made it readable for all users. A lock that another user can open can be held by them.
        folder.chmod(OWNERS_FOLDER)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(folder), remedy=_REMEDY) from None
    return folder


# A study stops before it loses anything when its folder cannot be written any more.

# With this reserve, the study's records and the lines of its history always find room.
_RESERVE = 32 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FolderError(Exception):
    """A study's files cannot be written. The message says why, and what to do."""


def number_of(root: Path) -> int:
    """The number by which a folder is recognised; 0 if it is not there."""
    try:
        return root.stat().st_ino
    except (OSError, ValueError):
        return 0


def check_folder(root: Path, number: int | None = None) -> None:
    """Raises FolderError if a study's folder is not in its place, or cannot be written.

    `number` is the folder's, because a write may have made another in its place. None if any will do.
    """
    there = number_of(root)
    if there == 0 or number not in (None, there):
        raise FolderError(
            f"The study's folder {root} was moved or removed while the study ran, so the study has ended. If you have "
            "moved it, resume with: zerotune resume followed by its new place. If it is gone, start a new study."
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise FolderError(
            f"The study's folder {root} can no longer be written: its disk or its permissions have become read-only. "
            f"Nothing is lost. Make it writable, then resume with: zerotune resume {root}"
        )


def check_room(root: Path) -> None:
    """Raises FolderError if there is no place, with room, for a trial's files in a study's folder."""
    check_folder(root)
    if shutil.disk_usage(root).free < _RESERVE:
        raise _full(root)


def check_end(root: Path, result: TrialResult) -> None:
    """Raises FolderError if a trial may have failed for lack of room, or of its folder.

    A trial that has filled the disk by itself, and has left room again, failed like any other. Its reason says why.
    """
    if result.outcome is Outcome.CRASHED:
        check_room(root)


@contextlib.contextmanager
def folder_error_told(root: Path) -> Iterator[None]:
    """Raises FolderError if the body could not write because of the study's folder, or of its disk."""
    try:
        yield
    except OSError as error:
        check_folder(root)
        if error.errno in _FULL:
            raise _full(root) from error
        raise


def _full(root: Path) -> FolderError:
    free = shutil.disk_usage(root).free
    return FolderError(
        f"The disk is full: {bytes_shown(free)} are free for {root}, or its quota is used up. Nothing is lost. "
        f"Free at least {bytes_shown(_RESERVE)}, then resume with: zerotune resume {root}"
    )
