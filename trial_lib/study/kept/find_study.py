"""Finds a study's folder by what the user types."""

import contextlib
from pathlib import Path

from trial_lib.records.study_folder import STUDIES, StudyPaths, StudyRecord
from trial_lib.wire.errors import InputError


def find_study(named: str | None, work_dir: Path) -> Path:
    """Returns the folder of a study.

    Args:
        named: its folder, its id, or the name of its experiment, whose newest study is meant. None is the newest study.
        work_dir: the folder that contains the studies.

    Raises:
        InputError: there is none.
    """
    if named is not None and ("/" in named or (Path(named) / "study.json").is_file()):
        # Reading the study reports what its folder lacks.
        return Path(named)
    folder = work_dir / STUDIES
    records = [record for record in folder.glob("*/study.json") if record.is_file()]
    found = sorted(records, key=lambda record: record.stat().st_mtime, reverse=True)
    for record in found:
        if named in (None, record.parent.name) or named == _experiment(StudyPaths(record.parent)):
            return record.parent
    raise InputError(
        "there is no study." if named is None else "no study has this path, id or name.",
        where=str(folder) if named is None else named,
        remedy=f"Name a folder in {STUDIES}, or run zerotune where that is.",
    )


def _experiment(paths: StudyPaths) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return StudyRecord.model_validate_json(paths.record.read_text()).name
    return None
