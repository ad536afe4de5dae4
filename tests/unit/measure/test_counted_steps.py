"""Steps count where they are of one batch."""

from types import SimpleNamespace

import pytest

from trial_lib.device.rank.cpu import Cpu
from trial_lib.measure.counted_steps import CountedStep, CountedSteps
from trial_lib.measure.step_clock import StepClock

NO_TIME = StepClock(Cpu()).step_ended({})


def follow(batches: list[int], enough: int = 3) -> tuple[CountedSteps, int]:
    """Counts steps of these batches, until enough of one are; returns them, and how many the program has taken."""
    counted = CountedSteps()
    for step, batch in enumerate(batches):
        if counted.follow_batch(SimpleNamespace(train_batch_size=lambda batch=batch: batch), enough):
            return counted, step
        counted.add(CountedStep(NO_TIME, {"samples": float(batch)}), None)
    return counted, len(batches)


def samples(counted: CountedSteps) -> list[float]:
    return [step.arrived["samples"] for step in counted.steps]


def test_a_batch_that_stays_is_nothing_to_tell() -> None:
    counted, _ = follow([16] * 5)
    assert (samples(counted), counted.note) == ([16.0] * 5, "")


def test_steps_of_a_batch_that_does_not_last_do_not_count() -> None:
    counted, _ = follow([16, 16, 32, 32])
    assert samples(counted) == [32.0, 32.0]
    assert "measured at a global batch of 32" in counted.note


@pytest.mark.parametrize("later", [64, 8])
def test_the_first_batch_that_lasts_is_the_one_that_is_measured(later: int) -> None:
    counted, taken = follow([16, 16, 32, 32, 32, later, later])
    assert (samples(counted), taken) == ([32.0] * 3, 5)
    assert "measured at a global batch of 32" in counted.note
