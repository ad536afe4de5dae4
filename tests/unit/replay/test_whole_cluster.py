"""The clusters whose program has switches: what each switch does, beside the figures that it stands for."""

from typing import Any

import pytest

from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import create
from benchmarks.replay.whole_cluster import WHOLE_CLUSTERS, WholeClusterWorld
from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE, FUSED, WORKERS
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome

NAME = "1.3B on 8 whole"
TYPED = {CHECKPOINTING: "none", COMPILE: False, ATTENTION: "sdpa", FUSED: False, WORKERS: 0}


@pytest.fixture(scope="module")
def world() -> WholeClusterWorld:
    """Returns a cluster that is by its formulas alone, and whose program waits for its loader."""
    world = next(
        each for each in (WholeClusterWorld(NAME, WHOLE_CLUSTERS[NAME], seed) for seed in range(9)) if waits(each)
    )
    world._off = lambda *_: 1.0  # type: ignore[method-assign]
    return world


def waits(world: WholeClusterWorld) -> bool:
    return WORKERS in world.submitted.knobs["program"]


def with_switches(world: WholeClusterWorld, size: int = 4, **switches: Any) -> Candidate:
    return world.candidate({"zero_optimization": {"stage": 2}, "program": {**TYPED, **switches}}, size)


def speed(world: WholeClusterWorld, **switches: Any) -> float:
    found = world.truth(with_switches(world, **switches))
    assert found is not None
    return found


def need(world: WholeClusterWorld, **switches: Any) -> float:
    return world._memory(with_switches(world, **switches))[1]


def test_the_submitted_configuration_is_the_program_as_typed(world: WholeClusterWorld) -> None:
    assert world.submitted.knobs["program"] == TYPED
    assert world.truth(world.submitted) is not None


def test_recomputation_takes_time_and_frees_memory(world: WholeClusterWorld) -> None:
    full, second = {CHECKPOINTING: "full"}, {CHECKPOINTING: "every_second"}
    assert speed(world, **full) < speed(world, **second) < speed(world)
    assert need(world, **full) < need(world, **second) < need(world)


def test_compilation_brings_no_more_than_was_published(world: WholeClusterWorld) -> None:
    assert 1.05 < speed(world, **{COMPILE: True}) / speed(world) < 6667 / 5762
    assert need(world, **{COMPILE: True}) < need(world)


def test_attention_as_written_takes_time_and_memory(world: WholeClusterWorld) -> None:
    assert speed(world, **{ATTENTION: "eager"}) < speed(world)
    assert need(world, **{ATTENTION: "eager"}) > 1.5 * need(world)


def test_workers_take_the_wait_away(world: WholeClusterWorld) -> None:
    by_workers = [speed(world, **{WORKERS: number}) for number in (0, 1, 2, 4)]
    assert by_workers == sorted(by_workers)
    assert by_workers[-1] > by_workers[0]


def test_the_best_is_found_among_the_arms_that_may_have_it(world: WholeClusterWorld) -> None:
    guesses = (world.truth(world.candidate(arm.family(0), 8)) or 0.0 for arm in world.problem.space.arms)
    assert world.best >= max(guesses)


def test_a_search_learns_of_all_switches_from_each_trial_that_runs_out_of_memory() -> None:
    """Without recomputation 70 billion parameters fit nowhere, so one trial at most is lost to it."""
    name = "70B on 1024 whole"
    world = WholeClusterWorld(name, WHOLE_CLUSTERS[name], seed=0)
    trials = simulate(create("adaptive", world, 0, 9), world, 0).trials
    assert any(trial.candidate.switches[COMPILE] for trial in trials[:4])
    assert sum(trial.outcome is Outcome.OUT_OF_MEMORY for trial in trials) <= 1
