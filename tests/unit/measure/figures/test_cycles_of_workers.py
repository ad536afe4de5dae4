"""A program that waits for a loader's workers is measured by whole cycles of them; every other one by the median."""

import pytest

from trial_lib.measure.batches.loader_batches import StepLoading
from trial_lib.measure.figures.counted_steps import CountedSteps
from trial_lib.measure.figures.worker_cycle import WorkerCycle, share_of_wait


@pytest.mark.parametrize(
    ("workers", "read", "cycle"), [(0, 1, 1), (1, 1, 1), (2, 1, 2), (2, 4, 1), (4, 2, 2), (3, 2, 3), (4, 0, 1)]
)
def test_a_cycle_ends_when_the_first_worker_is_in_turn_again(workers: int, read: int, cycle: int) -> None:
    steps = [StepLoading(read=read, place=read * number, workers=workers) for number in range(1, 13)]
    assert steps[0].cycle == cycle
    if read:
        assert len({step.phase for step in steps}) == cycle


def test_bursts_of_two_workers_cost_their_mean() -> None:
    cycle = WorkerCycle.of([0, 1, 0], length=2, share=0.9)
    assert cycle.is_covered
    assert cycle.step_time([0.744, 0.056, 0.736]) == pytest.approx(0.398)


def test_a_step_of_the_cycle_that_no_counted_one_stands_for_is_missing() -> None:
    cycle = WorkerCycle.of([2, 3, 0], length=4, share=0.5)
    assert (cycle.is_covered, cycle.missing) == (False, 1)
    assert WorkerCycle.of([2, 3, 0, 1], length=4, share=0.5).is_covered


def test_ranks_whose_loaders_differ_do_not_count_for_ever() -> None:
    assert WorkerCycle.of([0] * 64, length=4, share=0.5).is_covered


@pytest.mark.parametrize(("length", "share"), [(2, 0.09), (1, 0.9), (40, 0.9)])
def test_where_nothing_waits_for_workers_the_median_stays(length: int, share: float) -> None:
    cycle = WorkerCycle.of([0, 1, 0], length, share)
    assert (cycle.is_covered, cycle.step_time([3.0, 1.0, 2.0])) == (True, 2.0)


def test_the_share_of_waiting_is_of_all_steps() -> None:
    assert share_of_wait([(0.7, 0.75), (0.0, 0.05)]) == pytest.approx(0.875)
    assert share_of_wait([]) == 0.0


@pytest.mark.parametrize(("seconds", "is_enough"), [(1.0, False), (30.0, True)])
def test_long_steps_are_not_counted_through_a_whole_cycle(seconds: float, is_enough: bool) -> None:
    counted = CountedSteps(slowest=3 * [seconds], _cycle=WorkerCycle.of([0, 1, 2], length=8, share=0.5))
    assert counted.cover_cycle(usual_s=0.5) is is_enough
