"""Sizes that one process group measures one after another on a GPU read what fresh processes read."""

import threading
from typing import Any

import pytest
from device_fixtures import host_of_tests

from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Sweep
from zerotune.trial_lib.records.result import TrialResult

pytestmark = [pytest.mark.alone, pytest.mark.devices(1, "cuda")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
SIZES = (2, 8, 32)


def swept(trials: Any, starter: WarmStarter, *words: str, sizes: tuple[int, ...] = SIZES, **options: Any) -> list[Any]:
    plans = [trials.plan(*words, micro_batch=size, window=SHORT, **options) for size in sizes]
    sweep = Sweep(tuple(plan.candidate for plan in plans), 0.0, headroom=0.05)
    notes: list[str] = []
    place = ThisHost(starter, host_of_tests(), trials.lock_dir)
    ends = place.run_sweep(plans, sweep, threading.Event(), notes.append, lambda position, result: None)
    assert all(isinstance(end, TrialResult) for end in ends), notes
    return ends


@pytest.mark.parametrize("stage", [0, 3])
def test_memory_is_what_a_fresh_process_takes(trials: Any, warm_starter: WarmStarter, stage: int) -> None:
    words, options = ("memory_use.py", "--mib_per_sample", "8"), {"zero": {"stage": stage}}
    ends = swept(trials, warm_starter, *words, **options)
    for size, end in zip(SIZES, ends, strict=True):
        assert end.outcome == "completed", end.reason
        fresh = trials.run(*words, micro_batch=size, window=SHORT, **options)
        assert end.memory.peak[0] == pytest.approx(fresh.memory.peak[0], rel=0.02)
        assert end.memory.after_initialize[0] == pytest.approx(fresh.memory.after_initialize[0], rel=0.02)


def test_retries_of_one_size_are_not_counted_for_the_next(trials: Any, warm_starter: WarmStarter) -> None:
    ends = swept(trials, warm_starter, "plain.py")
    assert [end.memory.allocator_retries for end in ends] == [[0]] * len(SIZES)


def test_a_size_that_does_not_fit_ends_the_sweep_as_out_of_memory(trials: Any, warm_starter: WarmStarter) -> None:
    words = ("memory_use.py", "--mib_per_sample", "32")
    first, second = swept(trials, warm_starter, *words, sizes=(2, 64), memory_limit=2**30)
    assert first.outcome == "completed", first.reason
    assert second.outcome == "out_of_memory", second.reason
