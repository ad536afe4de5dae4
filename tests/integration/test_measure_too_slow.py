"""Trials that cannot win any more are stopped."""

import dataclasses
from typing import Any

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome, TrialResult

pytestmark = pytest.mark.alone

LONG = StepWindow(start_step=2, end_step=21, max_steps=20)


def trial(trials: Any, to_beat: float | None, **options: Any) -> TrialResult:
    plan = dataclasses.replace(trials.plan("slow_data.py", window=LONG, **options), to_beat=to_beat)
    result: TrialResult = trials.start(plan).result()
    return result


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_trial_that_cannot_reach_the_best_is_stopped_on_all_ranks(trials: Any, slots: int) -> None:
    result = trial(trials, to_beat=1e6, slots=slots)
    assert result.outcome is Outcome.TOO_SLOW
    assert result.reason.startswith("After 3 counted steps it trains ")
    assert result.reason.endswith("samples/s (99% sure). The best has 1e+06.")
    assert len(result.step_times) == 3
    assert len(result.losses) == 4
    assert result.metrics == {}
    assert len(result.memory.peak) == len(result.memory.after_initialize) == slots


def test_a_trial_that_can_still_win_or_has_nothing_to_beat_is_measured_to_its_end(trials: Any) -> None:
    for to_beat in (1.0, None):
        result = trial(trials, to_beat=to_beat)
        assert result.outcome is Outcome.COMPLETED, result.reason
        assert len(result.step_times) == 20
