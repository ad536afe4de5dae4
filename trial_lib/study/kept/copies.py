"""Telling a copy of a study's folder, or of a full experiment's, from the original: a copy is a study of its own.

Both would else be known by one id, and MLflow would mix their runs. A record keeps where its folder stood when it was
last opened. A folder that stands elsewhere was moved, or is a copy:

    the original can be seen         it is a copy
    it cannot, on the same host      it was moved
    ... on another host              one cannot know: it may be resumed beside the original, so it is a copy. If it
                                     is only sent to MLflow, it keeps the original's id
"""

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from trial_lib.records.full_experiment_folder import FullExperimentRecord
from trial_lib.records.study_folder import StudyRecord
from trial_lib.records.whereabouts import Whereabouts, whereabouts_of

_RecordT = TypeVar("_RecordT", StudyRecord, FullExperimentRecord)

_DIGITS = 6


def told_apart(record: _RecordT, file: Path, resumes: bool) -> tuple[_RecordT, str]:
    """Returns a folder's record as its own: that of a copy has another id, and no flow run that resumes it.

    Args:
        record: of a study, or of a full experiment that is no study's; written by whoever opens it.
        file: that the record stands in.
        resumes: whether the work is to be resumed, rather than sent to MLflow as it is.

    Returns:
        The record, and what people are to be told of it; empty where it is no copy.
    """
    its_name = "study_id" if isinstance(record, StudyRecord) else "experiment_id"
    own_id: str = getattr(record, its_name)
    kept = record.whereabouts
    if kept is None or not is_copy(kept, file, own_id, resumes):
        return record, ""
    now = whereabouts_of(file.parent)
    # The same each time that the original is copied to this place again.
    new_id = f"{own_id}-{hashlib.sha256(f'{now.host}:{now.path}'.encode()).hexdigest()[:_DIGITS]}"
    changes = {its_name: new_id, "flow_run_id": None, "whereabouts": now}
    note = f"this folder is a copy of {own_id} ({kept.path} on {kept.host}): it has runs of its own, as {new_id}."
    return record.model_copy(update=changes), note


def is_copy(kept: Whereabouts, file: Path, own_id: str, resumes: bool) -> bool:
    """Returns whether a folder is a copy.

    Args:
        kept: where it stood when it was last opened.
        file: its record.
        own_id: what the record is known by.
        resumes: see `told_apart`.
    """
    now = whereabouts_of(file.parent)
    # A copy on another file system may have the original's number by chance.
    has_its_number = now.inode == kept.inode
    original = Path(kept.path)
    if _has_another(original, file, own_id):
        return not has_its_number or _number(original) in (kept.inode, None)
    return resumes and not has_its_number and now.host != kept.host


def _has_another(original: Path, file: Path, own_id: str) -> bool:
    """Returns whether a folder other than the record's stands where that was, and has the same id."""
    try:
        if original.samefile(file.parent):
            return False
        text = (original / file.name).read_text(encoding="utf-8")
    except PermissionError:
        # Another user's.
        return True
    except (OSError, ValueError):
        return False
    return json.dumps(own_id) in text


def _number(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except (OSError, ValueError):
        return None
