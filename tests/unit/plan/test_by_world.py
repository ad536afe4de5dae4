from dataclasses import replace

import pytest
from synthetic import DEVICE, EXACT, carried, moving, product, run_of

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.devices import Cluster
from zerotune.trial_lib.plan.scaling import at_world
from zerotune.trial_lib.plan.step_time import planned_step


def of_world(ranks: int, stage: int) -> ForeseenRun:
    share = 1.0 if stage == 0 else 2 / ranks
    update = [moving(0.5 * share, "update"), carried(0.25, "all_gather", ranks)]
    backward = [product(2.0), carried(0.5, "all_reduce", ranks)]
    stretches = [("forward", [product(1.0)]), ("backward", backward), ("update", update)]
    run = run_of(*stretches, world=ranks, replicas=ranks, stage=stage)
    return run if ranks > 1 else replace(run, operations=tuple(each for each in run.operations if each.kind < 10))


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_states_are_divided_and_groups_grow(stage: int, ranks: int) -> None:
    assert at_world(of_world(2, stage), ranks) == of_world(ranks, stage)


def test_one_rank_sends_nothing() -> None:
    alone = at_world(of_world(2, 1), 1)
    parts = planned_step(alone, Cluster(device=DEVICE), EXACT).parts
    assert parts["reducing"] == parts["gathering"] == 0.0
    assert parts["update"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="one replica"):
        at_world(alone, 2)


def test_more_ranks_swap_less_each() -> None:
    run = run_of(("forward", [moving(1.0, "from_disk")]), world=2, replicas=2, stage=3)
    assert [each.moved for each in at_world(run, 8).operations] == [0.25 * run.operations[0].moved]


def test_the_whole_gradient_of_a_parameter_that_several_ranks_share_goes_to_the_host_whatever_their_number() -> None:
    both = [moving(1.0, "to_host"), moving(1.0, "to_host")]
    run = run_of(("backward", both), world=512, replicas=512, stage=2)
    whole, share = 130e6, 0.7e6
    operations = tuple(one._replace(moved=moved) for one, moved in zip(run.operations, (whole, share), strict=True))
    run = replace(run, operations=operations, parameters=93_000_000)
    assert [each.moved for each in at_world(run, 4).operations] == [whole, pytest.approx(128 * share)]
    # On fewer ranks it is still more than a share.
    few = replace(run, world=4, replicas=4, operations=(operations[0],))
    assert [each.moved for each in at_world(few, 64).operations] == [whole]


def test_groups_of_tensor_parallelism_stay() -> None:
    pairs = run_of(("forward", [carried(0.5, "all_reduce", 2), carried(0.5, "all_reduce", 4)]), world=8, replicas=4)
    more = at_world(pairs, 8)
    assert [each.ranks for each in more.operations] == [2, 8]
    assert more.world == 16


def test_a_group_of_tensor_parallelism_of_as_many_ranks_as_replicas_stays_and_carries_no_states() -> None:
    shared, of_states = (carried(0.5, "all_reduce", 4)._replace(apart=apart) for apart in (1, 4))
    run = run_of(("backward", [shared, of_states]), world=16, replicas=4)
    assert [each.ranks for each in at_world(run, 8).operations] == [4, 8]
    parts = planned_step(run, Cluster(device=DEVICE, hosts=1, per_host=16), EXACT).parts
    assert parts["exchanging"] == pytest.approx(parts["reducing"])


def test_groups_of_ranks_that_share_a_sample_stay_and_those_with_all_states_grow() -> None:
    """Under Ulysses ZeRO partitions over the ranks of all replicas."""
    work = [carried(0.5, "all_to_all", 2), carried(0.5, "all_gather", 8)]
    shared = run_of(("forward", work), world=8, replicas=4, stage=3, sequence_ranks=2)
    assert [each.ranks for each in at_world(shared, 8).operations] == [2, 16]
    parts = planned_step(shared, Cluster(device=DEVICE, hosts=1, per_host=8), EXACT).parts
    assert parts["gathering"] > 0
    assert parts["exchanging"] > 0


def test_stages_of_a_pipeline_send_in_the_group_of_all_ranks() -> None:
    """On more hosts they are on different ones."""
    work = [carried(0.5, "send", 8), carried(0.5, "all_reduce", 4)]
    stages = run_of(("forward", work), world=8, replicas=4, is_pipeline=True, pipeline_stages=2)
    assert [each.ranks for each in at_world(stages, 8).operations] == [16, 8]
