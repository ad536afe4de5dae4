import pytest

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, Operation
from zerotune.trial_lib.plan.devices import (
    Cluster,
    Constant,
    Efficiencies,
    Group,
    collective_seconds,
    copy_seconds,
    group_of,
    known_devices,
)

ALL = Efficiencies(link=Constant(1.0, 0.1), network=Constant(1.0, 0.1), to_host=Constant(1.0, 0.1))
TWO_HOSTS = Cluster(device=known_devices()["h100-80gb"], hosts=2, per_host=8)
GIGA = 1e9


def group(ranks: int, apart: int = 0, **of_run: int) -> Group:
    return group_of(Operation(0, 0, 0.0, 1.0, ranks, apart=apart), ForeseenRun(world=16, **of_run), TWO_HOSTS)


def test_a_ring_within_a_host_is_bound_by_its_link() -> None:
    """7/8 of 4.5 GB over 450 GB/s, and 7 hops of 3.4 microseconds after NCCL's 8.4."""
    seconds = collective_seconds("all_gather", 4.5 * GIGA, Group(8, 8), TWO_HOSTS, ALL)
    assert seconds == pytest.approx(8.75e-3 + 8.4e-6 + 7 * 3.4e-6)
    twice = collective_seconds("all_reduce", 4.5 * GIGA, Group(8, 8), TWO_HOSTS, ALL)
    assert twice == pytest.approx(2 * 8.75e-3 + 8.4e-6 + 14 * 3.4e-6)


def test_between_hosts_the_adapters_of_a_host_add_up() -> None:
    """15/16 of 4 GB through 8 adapters of 50 GB/s."""
    seconds = collective_seconds("reduce_scatter", 4 * GIGA, Group(16, 8), TWO_HOSTS, ALL)
    assert seconds == pytest.approx(4 * 15 / 16 / 400, rel=0.02)
    alone = collective_seconds("reduce_scatter", 4 * GIGA, Group(2, 1), TWO_HOSTS, ALL)
    assert alone == pytest.approx(4 / 2 / 50, rel=0.02)


def test_small_collectives_cost_their_hops() -> None:
    assert collective_seconds("all_gather", 1.0, Group(16, 8), TWO_HOSTS, ALL) == pytest.approx(
        8.4e-6 + 14 * 3.4e-6 + 14e-6
    )
    assert collective_seconds("all_gather", 4 * GIGA, Group(1, 1), TWO_HOSTS, ALL) == 0.0


def test_a_rank_sends_over_its_own_link_or_adapter() -> None:
    """4.5 GB over 450 GB/s, and over 50 GB/s to another host. The other ranks of the group do not share them."""
    within = collective_seconds("send", 4.5 * GIGA, Group(8, 8), TWO_HOSTS, ALL)
    assert within == pytest.approx(10e-3 + 8.4e-6 + 3.4e-6)
    between = collective_seconds("send", 4.5 * GIGA, Group(16, 8), TWO_HOSTS, ALL)
    assert between == pytest.approx(90e-3 + 8.4e-6 + 14e-6)


@pytest.mark.parametrize(
    ("ranks", "replicas", "members"),
    [(16, 16, 8), (8, 8, 4), (2, 8, 2), (4, 16, 4), (8, 16, 8), (2, 2, 1)],
    ids=["all", "replicas of pairs", "a pair", "a sequence", "a long sequence", "replicas of eights"],
)
def test_replicas_under_tensor_parallelism_are_apart_and_others_are_neighbours(
    ranks: int, replicas: int, members: int
) -> None:
    assert group(ranks, replicas=replicas) == Group(ranks, members)


def test_as_many_neighbours_as_replicas_are_told_from_these() -> None:
    """Four ranks share a layer, and four replicas of it lie four ranks apart."""
    assert group(4, 1, replicas=4) == Group(4, 4)
    assert group(4, 4, replicas=4) == Group(4, 2)


@pytest.mark.parametrize(
    ("replicas", "stages", "members"),
    [(8, 2, 8), (4, 4, 4), (4, 2, 4)],
    ids=["two stages", "four stages", "with pairs"],
)
def test_replicas_of_a_stage_of_a_pipeline_are_neighbours(replicas: int, stages: int, members: int) -> None:
    assert group(replicas, replicas=replicas, pipeline_stages=stages) == Group(replicas, members)


def test_pages_that_are_not_locked_are_slower() -> None:
    locked, not_locked = (copy_seconds(GIGA, pinned, TWO_HOSTS, ALL) for pinned in (True, False))
    assert locked == pytest.approx(1 / 64, rel=0.01)
    assert not_locked > 2 * locked


def test_devices_on_one_switch_share_the_link_to_their_host() -> None:
    device = known_devices()["a100-80gb"]
    one, two, eight = (
        copy_seconds(GIGA, True, Cluster(device=device, hosts=1, per_host=count), ALL) for count in (1, 2, 8)
    )
    assert one == pytest.approx(1 / 32, rel=0.01)
    assert two == eight == pytest.approx(2 * one, rel=0.01)
