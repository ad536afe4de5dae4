"""A study whose readings vary: what may be the answer is run another time, as a trial of its own."""

from collections import Counter
from pathlib import Path

import pytest
from simulated_studies import CutShortError, Experiment

from zerotune.trial_lib.records.candidate import Candidate, Purpose

STUDY = {"method": "adaptive", "max_trials": 16, "from_earlier": False}


def unsteady(folder: Path) -> Experiment:
    """Returns an experiment of which all configurations train as fast, and no two readings are the same."""
    folder.mkdir()
    team = Experiment(folder)
    team.scatter = 0.1
    team.speed = lambda _: 100.0
    return team


def name(candidate: Candidate) -> tuple[str, int]:
    return candidate.family, candidate.micro_batch_size


def named(team: Experiment) -> list[tuple[int, Purpose, tuple[str, int]]]:
    return [(number, purpose, name(candidate)) for number, purpose, candidate in team.ran]


def test_a_second_reading_is_run_and_has_a_number_and_a_result_of_its_own(tmp_path: Path) -> None:
    team = unsteady(tmp_path / "team")
    study = team.tune(**STUDY)
    searched = [(number, key) for number, purpose, key in named(team) if purpose is Purpose.SEARCH]
    again = {key for key, times in Counter(key for _, key in searched).items() if times > 1}
    assert again
    for key in again:
        numbers = [number for number, other in searched if other == key]
        read = {study.driver.state.results[number].metrics["throughput"] for number in numbers}
        assert len(read) == len(set(numbers)) == len(numbers)


def test_a_study_that_is_cut_short_in_a_second_reading_is_resumed_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, cut = unsteady(tmp_path / "whole"), unsteady(tmp_path / "cut")
    whole.tune(**STUDY)
    searched = [key if purpose is Purpose.SEARCH else None for _, purpose, key in named(whole)]
    second = next(place for place, key in enumerate(searched) if key is not None and key in searched[:place])
    with cut.opened(**STUDY) as study, pytest.raises(CutShortError):
        cut.finish(study, trials=second)
    before = named(cut)
    with cut.resumed(study.paths.root) as study:
        cut.finish(study)
    assert before + named(cut) == named(whole)
