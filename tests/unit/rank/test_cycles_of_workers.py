"""A program that waits for a loader's workers is measured by whole cycles of them; every other one by the mean."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerotune.trial_lib.rank import counted_steps
from zerotune.trial_lib.rank.counted_steps import CountedStep, CountedSteps, WorkerCycle, share_of_wait
from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.engine_watch import StepClock
from zerotune.trial_lib.rank.loader_batches import LoaderBatches, StepLoading, WorkersRead


@pytest.mark.parametrize(("workers", "read", "cycle"), [(1, 1, 1), (2, 1, 2), (2, 4, 1), (4, 2, 2), (3, 2, 3)])
def test_a_cycle_ends_when_the_first_worker_is_in_turn_again(workers: int, read: int, cycle: int) -> None:
    steps = [StepLoading(0.0, (WorkersRead(read, read * number, workers),)) for number in range(1, 13)]
    assert steps[0].cycle == cycle
    assert len({step.phase(steps[0]) for step in steps}) == cycle


def test_a_step_without_workers_has_no_cycle() -> None:
    assert (StepLoading().cycle, StepLoading().phase(StepLoading())) == (1, -1.0)


def test_two_loaders_have_the_cycle_that_is_one_of_each() -> None:
    steps = [StepLoading(0.0, (WorkersRead(1, place, 4), WorkersRead(1, place, 6))) for place in range(1, 25)]
    assert steps[0].cycle == 12
    assert len({step.phase(steps[0]) for step in steps}) == 12


def test_ranks_that_have_read_more_before_are_in_the_same_phases() -> None:
    ranks = [[StepLoading(0.0, (WorkersRead(1, place + more, 4),)) for place in range(8)] for more in (0, 1)]
    here, there = ([step.phase(steps[0]) for step in steps] for steps in ranks)
    assert here == there == [0, 1, 2, 3] * 2


def test_a_step_in_which_workers_start_is_no_part_of_a_cycle() -> None:
    start = StepLoading(0.0, (WorkersRead(1, 1, 4),), begins=True).phase(StepLoading())
    cycle = WorkerCycle.of([0, 1, 2, start, 2], length=4, share=0.5)
    assert cycle.missing == 1
    assert cycle.step_time([0.02, 0.02, 0.02, 1.0, 0.02]) == pytest.approx(0.02)
    only = WorkerCycle.of([start, start], length=2, share=0.5)
    assert (only.missing, only.step_time([1.0, 3.0])) == (1, 2.0)


def step(seconds: float, waited_s: float, place: int, begins: bool = False) -> CountedStep:
    loading = StepLoading(waited_s, (WorkersRead(1, place, 4),), begins)
    counted = CountedStep(StepClock(CpuDevice()).step_ended({}), {"samples": 4.0}, loading=loading)
    counted.__dict__["seconds"] = {"latency": seconds}
    return counted


def test_an_epoch_s_first_step_makes_no_program_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_steps, "most", lambda values, engine: values)
    watch: Any = SimpleNamespace(
        engine=SimpleNamespace(
            dp_world_size=1, train_micro_batch_size_per_gpu=lambda: 4, gradient_accumulation_steps=lambda: 1
        ),
        samples_in=lambda arrived: arrived["samples"],
    )
    counted = CountedSteps()
    for number in range(1, 5):
        counted.add(step(0.02, 0.0, number + 4), None)
    counted.add(step(1.0, 0.98, 1, begins=True), None)
    counted.agree(watch)
    assert (counted.next_covered, counted._cycle.step_time(counted.slowest)) == (0, 0.02)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> LoaderBatches:
    for name in ("__next__", "__init__"):
        monkeypatch.setattr(_BaseDataLoaderIter, name, getattr(_BaseDataLoaderIter, name))
    installed = LoaderBatches()
    installed.install()
    return installed


@pytest.mark.parametrize("stays", [True, False])
def test_batches_are_counted_by_iterator(batches: LoaderBatches, stays: bool) -> None:
    def loader(workers: int) -> Any:
        kept = {"persistent_workers": stays} if workers else {}
        return DataLoader(TensorDataset(torch.zeros(3)), num_workers=workers, **kept)

    trains, looks, plain = loader(2), loader(1), loader(0)
    next(iter(looks))
    batches.take_loading()
    found = []
    for _ in range(2):
        for _ in zip(trains, plain, strict=True):
            loading = batches.take_loading()
            found.append((loading.by_workers, loading.begins))
    epoch = [((WorkersRead(1, place, 2),), place == 1) for place in (1, 2, 3)]
    assert found == [*epoch, *epoch]


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
def test_where_nothing_waits_for_workers_all_steps_count(length: int, share: float) -> None:
    cycle = WorkerCycle.of([0, 1, 0], length, share)
    assert (cycle.is_covered, cycle.step_time([6.0, 1.0, 2.0])) == (True, 3.0)


def test_the_share_of_waiting_is_of_all_steps() -> None:
    assert share_of_wait([(0.7, 0.75), (0.0, 0.05)]) == pytest.approx(0.875)
    assert share_of_wait([]) == 0.0


@pytest.mark.parametrize(("seconds", "is_enough"), [(1.0, False), (30.0, True)])
def test_long_steps_are_not_counted_through_a_whole_cycle(seconds: float, is_enough: bool) -> None:
    counted = CountedSteps(slowest=3 * [seconds], _cycle=WorkerCycle.of([0, 1, 2], length=8, share=0.5))
    assert counted.cover_cycle(usual_s=0.5) is is_enough
