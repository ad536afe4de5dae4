"""The trials of a study that wait for slots, as their folders say."""

import json
from collections.abc import Iterable

from trial_lib.records.study_folder import StudyPaths
from trial_lib.records.units import duration
from trial_lib.wire.moments import seconds_since


def waiting_trials(paths: StudyPaths, numbers: Iterable[int]) -> dict[int, str]:
    """Returns those of some trials that wait for slots, each with what it waits for and how long it has waited."""
    found = {}
    for number in numbers:
        # A profile trial begins with the program as typed.
        trial = paths.trial(number)
        for file in (trial.waiting, trial.as_typed.waiting):
            try:
                wait = json.loads(file.read_text())
                found[number] = f"{wait['waiting']}, after {duration(seconds_since(wait['since']))}"
            except (OSError, ValueError, KeyError, TypeError):
                continue
    return found
