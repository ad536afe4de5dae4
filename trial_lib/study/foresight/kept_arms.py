"""The foreseen arms of a study in its folder, so that a resumed study begins its search with the same."""

import json
import logging
import shutil
from pathlib import Path

from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.study.foresight.in_background import Foresight
from trial_lib.wire.whole_files import write_whole


def keep_foreseen(foresight: Foresight, file: Path, log: logging.Logger) -> None:
    """Ends the foreseen runs, and writes the arms that they have found.

    Args:
        foresight: has run beside the profile trial.
        file: of the study. Without arms there is none.
        log: the study's log. It gets one line.
    """
    arms = foresight.end()
    shutil.rmtree(foresight.folder, ignore_errors=True)
    if arms:
        write_whole(file, json.dumps([arm.to_json() for arm in arms], indent=1))
        log.info("The search begins with the memory of %d foreseen arms.", len(arms))
    else:
        reason = foresight.failure or "the profile trial ended first."
        log.info("The search begins with formulas of memory, because the program was not foreseen: %s", reason)


def foreseen_in(file: Path) -> tuple[ForeseenArm, ...]:
    """Returns the arms of a study's file; none if it does not exist."""
    if not file.exists():
        return ()
    return tuple(ForeseenArm.from_json(arm) for arm in json.loads(file.read_text()))
