"""Reads files that ZeroTune has written, and that a person or a disk may have damaged since."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.study_folder import DrivenFolder, StudyPaths, StudyRecord
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import write_whole

_RecordT = TypeVar("_RecordT", bound=BaseModel)


def read_own_text(path: Path, what: str, remedy: str) -> str:
    """Returns the text of a file that ZeroTune has written.

    Args:
        path: the file.
        what: what it is, such as `the study's record`.
        remedy: what to do if it is damaged.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is no file, cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        said = f"{what} is damaged: not UTF-8 (byte {error.start})."
        raise InputError(said, where=str(path), remedy=remedy) from None
    except OSError as error:
        raise InputError(f"{what} cannot be read ({error.strerror}).", where=str(path), remedy=remedy) from None


def read_record_file(path: Path, model: type[_RecordT], what: str, remedy: str) -> _RecordT:
    """Returns a record that ZeroTune has written. The arguments are those of `read_own_text`.

    Raises:
        FileNotFoundError: there is none.
        InputError: it is damaged, or of another version.
    """
    text = read_own_text(path, what, remedy)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise InputError(is_damaged(what, error), where=str(path), remedy=remedy) from None


def is_damaged(what: str, error: ValidationError) -> str:
    """Returns the sentence on a record with mistakes."""
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
    """Returns the wrapper of a study or a full experiment; empty if it has none.

    Raises:
        InputError: its file is damaged.
    """
    try:
        return read_record_file(paths.wrapper, TypedWrapper, "the typed command", "Start a new study.").words
    except FileNotFoundError:
        return ()


def read_record(paths: StudyPaths) -> StudyRecord:
    """Returns a study's record.

    Raises:
        InputError: the folder is not a study's, or its record is damaged.
    """
    if not paths.record.is_file():
        raise InputError(
            "this is not a study's folder: it has no study.json.",
            where=str(paths.root),
            remedy="Name one of the folders in zerotune-studies.",
        )
    return read_record_file(paths.record, StudyRecord, "the study's record", "Restore the file.")


def write_study_record(paths: StudyPaths, record: StudyRecord) -> None:
    """Writes a study's record for this user alone, because arguments and configuration may hold secrets."""
    write_whole(paths.record, record.model_dump_json(indent=2), mode=0o600)
