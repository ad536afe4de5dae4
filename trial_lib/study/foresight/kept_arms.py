"""The foreseen arms of a study in its folder, so that a resumed study begins its search with the same."""

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.study.foresight.in_background import Foresight
from trial_lib.study.kept.record_file import read_own_text
from trial_lib.wire.errors import InputError
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
        keep_arms(arms, file)
        log.info("The search begins with the memory of %d foreseen arms.", len(arms))
    else:
        reason = foresight.failure or "the profile trial ended first."
        log.info("The search begins with formulas of memory, because the program was not foreseen: %s", reason)


def keep_arms(arms: Iterable[ForeseenArm], file: Path) -> None:
    """Writes the foreseen arms that a search begins with."""
    write_whole(file, json.dumps([arm.to_json() for arm in arms], indent=1))


def foreseen_in(file: Path) -> tuple[ForeseenArm, ...]:
    """Returns the arms of a study's file; none if it does not exist.

    Raises:
        InputError: it is damaged.
    """
    remedy = "Start a new study."
    try:
        text = read_own_text(file, "the record of foreseen arms", remedy)
        return tuple(ForeseenArm.from_json(arm) for arm in json.loads(text))
    except FileNotFoundError:
        return ()
    except (ValueError, LookupError, TypeError, AttributeError):
        said = "the record of foreseen arms is damaged or of another version."
        raise InputError(said, where=str(file), remedy=remedy) from None
