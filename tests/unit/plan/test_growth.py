"""The growth of one arm with the micro-batch is that of another arm."""

from dataclasses import replace

import pytest

from tests.unit.plan.pretended_runs import pretended_run
from tests.unit.plan.test_by_size import step_of
from zerotune.trial_lib.messages.foreseen_run import Storage
from zerotune.trial_lib.plan.scaling import growth_between


def _run(stage: int, micro_batch: int, **zero: object):
    return pretended_run({"zero_optimization": {"stage": stage, **zero}}, 8, micro_batch)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_larger_run_of_another_stage_is_what_it_would_have_been(stage: int) -> None:
    growth = growth_between(_run(1, 2), _run(1, 4))
    assert growth is not None
    assert growth.sure == 1.0
    grown, run = growth.of(_run(stage, 2)), _run(stage, 4)
    assert grown.storages == run.storages
    assert grown.operations == run.operations
    assert grown.micro_batch == 4


def test_offloaded_states_stay_as_they_are() -> None:
    growth = growth_between(_run(1, 2), _run(1, 4))
    assert growth is not None
    offloads = {"offload_optimizer": {"device": "cpu"}}
    assert growth.of(_run(1, 2, **offloads)).storages == _run(1, 4, **offloads).storages


def test_a_step_of_one_micro_batch_shows_the_growth_of_a_step_of_two() -> None:
    growth = growth_between(step_of(2, 2), step_of(4, 1))
    assert growth is not None
    assert growth.of(step_of(2, 2)).storages == step_of(4, 2).storages


def test_a_growth_that_is_not_sure_is_none() -> None:
    small, large = _run(1, 2), _run(1, 4)
    equal = tuple(Storage(1000, 3, 0) for _ in small.storages)
    different = tuple(Storage(1000 * (1 + index % 2), 3, 0) for index, _ in enumerate(large.storages))
    assert growth_between(replace(small, storages=equal), replace(large, storages=different)) is None
    assert growth_between(small, replace(large, moments=large.moments[:-1])) is None


def test_runs_name_their_data_types_in_an_order_of_their_own() -> None:
    growth = growth_between(_run(1, 2), _run(1, 4))
    assert growth is not None
    small, large = (
        replace(
            run,
            dtypes=("int64", "bfloat16"),
            operations=tuple(each._replace(dtype=1) for each in run.operations),
            loading_s=(),
        )
        for run in (_run(3, 2), _run(3, 4))
    )
    assert growth.of_another_arm(small) == large


def test_an_arm_with_other_operations_does_not_grow_as_the_pair_does() -> None:
    growth = growth_between(_run(1, 2), _run(1, 4))
    assert growth is not None
    run = _run(3, 2)
    other = replace(run, operations=tuple(each._replace(flops=1.5 * each.flops) for each in run.operations))
    assert growth.of_another_arm(run) is not None
    assert growth.of_another_arm(other) is None
