"""Copies of folders of studies and full experiments. A copy is a study of its own.

Otherwise both would have one id, and MLflow would mix their runs. A record holds where its folder was when it was last
opened. A folder in another place was moved, or is a copy:

    the original can be seen         it is a copy
    it cannot, on the same host      it was moved
    ... on another host              unknown. If it is resumed it counts as a copy, because the original may be resumed
                                     as well. If it is only sent to MLflow, it keeps the original's id
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
    """Returns a folder's record with its own id. The record of a copy has another id, and no flow run.

    Args:
        record: of a study, or of a full experiment without a study. The caller writes it.
        file: the record's file.
        resumes: whether the work will be resumed. If not, it is sent to MLflow as it is.

    Returns:
        The record, and a note for the user; the note is empty if the folder is no copy.
    """
    its_name = "study_id" if isinstance(record, StudyRecord) else "experiment_id"
    own_id: str = getattr(record, its_name)
    kept = record.whereabouts
    if kept is None or not is_copy(kept, file, own_id, resumes):
        return record, ""
    now = whereabouts_of(file.parent)
    # Another copy of the original to this place gets the same id.
    new_id = f"{own_id}-{hashlib.sha256(f'{now.host}:{now.path}'.encode()).hexdigest()[:_DIGITS]}"
    changes = {its_name: new_id, "flow_run_id": None, "whereabouts": now}
    note = f"this folder is a copy of {own_id} ({kept.path} on {kept.host}), so it has runs of its own, as {new_id}."
    return record.model_copy(update=changes), note


def is_copy(kept: Whereabouts, file: Path, own_id: str, resumes: bool) -> bool:
    """Returns whether a folder is a copy.

    Args:
        kept: where it was when it was last opened.
        file: its record's file.
        own_id: the id in the record.
        resumes: as for `told_apart`.
    """
    now = whereabouts_of(file.parent)
    # A copy on another file system may have the original's number by chance.
    has_its_number = now.inode == kept.inode
    original = Path(kept.path)
    if _has_another(original, file, own_id):
        return not has_its_number or _number(original) in (kept.inode, None)
    return resumes and not has_its_number and now.host != kept.host


def _has_another(original: Path, file: Path, own_id: str) -> bool:
    """Returns whether another folder is in the record's old place and has the same id."""
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


def _number(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except (OSError, ValueError):
        return None
