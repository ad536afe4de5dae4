"""The answer of a study of few trials beside the user's configuration."""

import copy

import pytest

from benchmarks.replay.never_worse import SWITCHED, answer_of, figures_of, started_anywhere
from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.records.switches import switches_of


@pytest.fixture(scope="module")
def world() -> TableWorld:
    return TableWorld.read(SWITCHED / "small_llama.jsonl")


def test_a_faster_candidate_is_confirmed(world: TableWorld) -> None:
    answer = answer_of(world, seed=1, trials=8)
    assert answer.confirmed == pytest.approx(answer.searched)
    assert answer.confirmed > 1.05


def test_the_confirmation_corrects_a_search_that_was_lucky(world: TableWorld) -> None:
    """The user has the best configuration. With noise of 20 % a slower one often reads better."""
    noisy = copy.copy(world)
    sizes = range(1, world.largest_size + 1)
    noisy.submitted = max(world.candidates(sizes), key=lambda each: world.truth(each) or 0.0)
    noisy.__dict__["noise"], noisy.__dict__["_disturbances"] = 0.2, [-0.2, 0.2]
    figures = figures_of([answer_of(noisy, seed, trials=8) for seed in range(8)])
    assert figures["worse_before_confirmation"] >= 2
    assert figures["worse"] < figures["worse_before_confirmation"]
    assert figures["answered_with_own"] >= 2


def test_the_user_may_start_anywhere_that_fits_with_the_switches_as_typed(world: TableWorld) -> None:
    starts = [started_anywhere(world, seed) for seed in range(20)]
    assert len({str(each.submitted) for each in starts}) > 4
    for each in starts:
        own = each.problem.base_config
        assert each.truth(each.submitted) is not None
        assert switches_of(each.submitted.knobs)[CHECKPOINTING] == switches_of(own)[CHECKPOINTING] == "none"
        assert switches_of(each.submitted.knobs) == switches_of(own)
        assert own["train_micro_batch_size_per_gpu"] == each.submitted.micro_batch_size
        assert own["zero_optimization"]["stage"] == each.submitted.zero_stage
    assert world.problem.base_config["train_micro_batch_size_per_gpu"] == 4
