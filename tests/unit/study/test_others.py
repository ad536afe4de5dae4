"""Which other configurations a study has measured, and the remedy if none of them ran."""

from typing import Any

import pytest

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.history import Asked, StudyState, Told
from zerotune.trial_lib.study.others import Others, others_of

BASE = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
WORDS = ["--micro-batch-size", "4", "--global-batch-size", "32", "--eval-batch-size=4", "--zero-stage", "1"]


def end(number: int, purpose: Purpose, candidate: Candidate, **fields: Any) -> list[Asked | Told]:
    given = {"outcome": Outcome.COMPLETED, "metrics": {"throughput": 1.0}, **fields}
    hashed = candidate.config_hash(BASE)
    result = TrialResult(trial_id=str(number), number=number, purpose=purpose, config_hash=hashed, **given)
    return [Asked(number, purpose, candidate), Told(number, result)]


def at(stage: int, size: int = 4) -> Candidate:
    knobs = {"zero_optimization": {"stage": stage}}
    return Candidate(
        knobs=knobs,
        micro_batch_size=size,
        gradient_accumulation_steps=16 // size,
        slots=2,
        data_parallel_size=2,
    )


OWN = end(1, Purpose.SUBMITTED, at(1))
BROKEN = {"outcome": Outcome.CRASHED, "reason": "The program raised ValueError: they must match", "metrics": {}}


def others(*events: list[Asked | Told], mapped: dict[str, str] | None = None) -> Others:
    state = StudyState([each for pair in (OWN, *events) for each in pair])
    return others_of(state, "throughput", BASE, WORDS, mapped or {})


def test_the_option_that_repeats_a_setting_is_named_with_what_to_type() -> None:
    found = others(end(2, Purpose.SEARCH, at(2), **BROKEN), end(3, Purpose.SEARCH, at(3), **BROKEN))
    assert found.headline == "None of the 2 others could be measured."
    assert found.reason == (
        "All ended like this one: The program raised ValueError: they must match. The command has --zero-stage 1 "
        "beside the configuration. Let each trial set that too: --map zero_optimization.stage=--zero-stage."
    )


def test_each_repeated_setting_is_named_once_and_none_that_is_mapped() -> None:
    broken = end(2, Purpose.SEARCH, at(2, size=8), **BROKEN)
    both = "--map zero_optimization.stage=--zero-stage --map train_micro_batch_size_per_gpu=--micro-batch-size."
    assert others(broken).reason.endswith(both)
    mapped = {"train_micro_batch_size_per_gpu": "--micro-batch-size"}
    assert others(broken, mapped=mapped).reason.endswith("too: --map zero_optimization.stage=--zero-stage.")


def test_your_own_configuration_under_another_number_is_no_other() -> None:
    assert others(end(2, Purpose.SEARCH, at(1))).tried == 0


def test_a_configuration_that_ran_in_one_of_its_trials_is_measured() -> None:
    found = others(end(2, Purpose.SEARCH, at(2), **BROKEN), end(3, Purpose.SEARCH, at(2)))
    assert (found.tried, found.measured, found.reason, found.note) == (1, 1, "", "")


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"outcome": Outcome.OUT_OF_MEMORY}, "--max-micro-batch"),
        ({"outcome": Outcome.OUT_OF_HOST_MEMORY}, "Free memory on the host"),
        (
            {"outcome": Outcome.CRASHED, "from_outside": True, "reason": "Rank 0 was killed by SIGKILL."},
            "Nothing shows which process did it. The kernel kills ranks when the host's memory runs out",
        ),
    ],
)
def test_each_kind_of_failure_has_its_remedy(fields: dict[str, Any], remedy: str) -> None:
    found = others(end(2, Purpose.SEARCH, at(2), metrics={}, **{"reason": "It ended.", **fields}))
    assert found.headline == "The only other configuration that was tried could not be measured."
    assert remedy in found.reason


def test_if_yours_ran_no_better_nothing_was_measured() -> None:
    state = StudyState(
        [*end(1, Purpose.SUBMITTED, at(1), **BROKEN), *end(2, Purpose.SEARCH, at(2), **BROKEN)],
    )
    found = others_of(state, "throughput", BASE, WORDS, {})
    assert found.headline == "Neither your configuration nor the only other one could be measured."
