"""Real ranks of one round train on the same samples, and those of the next round on others."""

import re
from dataclasses import replace
from typing import Any

import pytest

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome, TrialResult


def run(trials: Any, order: str, share: float, micro_batch: int, accumulation: int, *more: str) -> TrialResult:
    arguments = ("--order", order, "--samples", "400", "--show", "1", *more)
    plan = trials.plan("lengths.py", *arguments, slots=2, micro_batch=micro_batch, accumulation=accumulation)
    window = StepWindow(start_step=3, end_step=6, max_steps=4)
    result: TrialResult = trials.start(replace(plan, window=window, data_offset=share, stream_offset=30)).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


def trained(trials: Any, result: TrialResult, samples: int) -> set[int]:
    """The first samples of both ranks."""
    found: set[int] = set()
    for rank in range(2):
        shown = re.findall(r"^samples (.*)$", trials.log(result, rank), re.MULTILINE)
        found |= set([int(each) for line in shown for each in line.split()][: samples // 2])
    return found


@pytest.mark.devices(2)
def test_two_micro_batches_train_on_the_same_samples_in_a_round_and_on_others_in_the_next(trials: Any) -> None:
    one, other, later = (
        run(trials, "sorted", share, *cut) for share, cut in ((0.25, (1, 4)), (0.25, (4, 1)), (0.75, (4, 1)))
    )
    first, second, third = (trained(trials, result, 48) for result in (one, other, later))
    assert first == second == set(range(100, 148))
    assert third == set(range(300, 348))
    # Of 200 samples of a rank.
    assert [(each.data_offset, each.data_places) for each in (one, later)] == [(50, 200), (150, 200)]
    # Tokens without padding: of the same samples they are as many.
    tokens = [each.metrics["tokens_per_second"] / each.metrics["throughput"] for each in (one, other)]
    assert tokens[0] == pytest.approx(tokens[1])
    assert one.metrics["data_spread"] > 0.0


@pytest.mark.devices(2)
def test_a_program_that_is_shorter_than_the_window_is_measured_to_its_end(trials: Any) -> None:
    plan = trials.plan("lengths.py", "--samples", "80", "--steps", "1", slots=2, micro_batch=2)
    window = StepWindow(start_step=3, end_step=102, max_steps=100, least_steps=3)
    result: TrialResult = trials.start(replace(plan, window=window, data_offset=0.5)).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.metrics["measured_steps"] == 80 // 4 - 2


@pytest.mark.devices(2)
@pytest.mark.parametrize("order", ["bucketed", pytest.param("stream", marks=pytest.mark.long)])
def test_other_data_are_moved_too(trials: Any, order: str) -> None:
    result = run(trials, order, 0.5, 2, 1)
    found = trained(trials, result, 24)
    # A rank has 100 batches of its own, in one bucket; and a stream begins after 30 samples of each rank.
    assert (result.data_offset, result.data_places) == ((50, 100) if order == "bucketed" else (30, None))
    assert order == "bucketed" or found == set(range(60, 84))


@pytest.mark.devices(2)
def test_the_loader_that_deepspeed_makes_is_moved_too(trials: Any) -> None:
    plan = trials.plan("own_reduction.py", "--reduction", "mean", slots=2)
    result = trials.start(replace(plan, data_offset=0.5)).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.data_offset == (result.data_places or 0) // 2 > 0


@pytest.mark.long
@pytest.mark.devices(2)
def test_a_program_that_makes_its_own_batches_says_that_it_could_not_be_moved(trials: Any) -> None:
    plan = trials.plan("plain.py", slots=2)
    result = trials.start(replace(plan, data_offset=0.5, stream_offset=30)).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.data_offset is None
    assert trials.start(plan).result().data_offset == 0
