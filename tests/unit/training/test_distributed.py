"""Where a rank stands, as its launcher describes it, and a world of one: without another process."""

import pytest

from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError

NODE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def position(ranks):
    return [ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.cross_rank, ranks.cross_size]


@pytest.fixture
def environment(monkeypatch):
    """Sets the environment of a rank, and nothing of its launcher's."""

    def setenv(**values):
        for name in ("RANK", "WORLD_SIZE", *NODE):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return setenv


def test_a_world_of_one_needs_no_process_group(environment):
    environment()
    alone = DistributedContext.from_torch()
    assert position(alone) == [0, 1, 0, 1, 0, 1]
    value = object()
    for collective in (alone.allgather, alone.allgather_local, alone.gather, alone.gather_local):
        assert collective(value) == [value]
    assert alone.broadcast(value) is alone.broadcast_local(value) is value
    alone.barrier()


@pytest.mark.parametrize(
    ("variables", "local_rank", "local_size", "cross_rank", "cross_size"),
    [
        ({"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, 1, 2, 2, 3),
        # DeepSpeed's launcher: nodes of 4 and 2 ranks.
        ({"LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2}, 1, 2, 1, 2),
        # torchrun, nodes of 1, 3 and 2 ranks.
        ({"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 2, "GROUP_WORLD_SIZE": 3}, 1, 2, 2, 3),
        ({}, 5, 6, 0, 1),
    ],
)
def test_the_node_is_read_as_launchers_describe_it(
    environment, variables, local_rank, local_size, cross_rank, cross_size
):
    environment(RANK=5, WORLD_SIZE=6, **variables)
    ranks = DistributedContext.from_torch()
    assert position(ranks) == [5, 6, local_rank, local_size, cross_rank, cross_size]


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": 0},  # more than one node, and nothing says how many ranks each has
        {"LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
        {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2},  # the node's second rank would be rank 6 of 6
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environment, variables):
    environment(RANK=5, WORLD_SIZE=6, **variables)
    with pytest.raises(InvalidTrialError, match=r"Rank 5 of 6 has LOCAL_RANK=.*set LOCAL_RANK and LOCAL_WORLD_SIZE"):
        DistributedContext.from_torch()
