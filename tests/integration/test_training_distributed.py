"""Real gloo ranks: objects between them, and metrics over all of them.

Run as a program this file is the ranks: it imports once, and forks a world for each size.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError
from zerotune.trial_lib.training.metrics import MetricAverager, MetricReducer, Reducers

RANKS_PER_NODE = 2
SIZES = (2, 4)
NODE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


# -- in a rank ---------------------------------------------------------------------------------------------------


class Mean(MetricReducer):
    def reset(self):
        self.sum, self.count = torch.zeros(1), 0

    def update(self, value):
        self.sum += value
        self.count += 1

    def per_slot_reduce(self):
        return {"sum": self.sum, "count": self.count}

    def cross_slot_reduce(self, per_slot_metrics):
        return sum(part["sum"] for part in per_slot_metrics) / sum(part["count"] for part in per_slot_metrics)


def positions(ranks):
    return [
        [ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.cross_rank, ranks.cross_size],
        [
            ranks.get_rank(),
            ranks.get_size(),
            ranks.get_local_rank(),
            ranks.get_local_size(),
            ranks.get_cross_rank(),
            ranks.get_cross_size(),
        ],
    ]


def objects(ranks):
    mine = {"rank": ranks.rank, "text": "x" * 1000 * ranks.rank}
    lengths = [len(theirs["text"]) for theirs in ranks.allgather(mine)]
    gathered = ranks.gather(ranks.rank)
    ranks.barrier()
    return {"allgather": lengths, "gather": gathered, "broadcast": ranks.broadcast(f"from {ranks.rank}")}


def objects_of_a_node(ranks):
    return {
        "allgather": ranks.allgather_local(ranks.rank),
        "gather": ranks.gather_local(ranks.rank),
        "broadcast": ranks.broadcast_local(f"from {ranks.rank}"),
    }


def one_node_alone(ranks):
    """Only the last node asks for the ranks of its node: the others need not take part."""
    is_last = ranks.cross_rank == ranks.cross_size - 1
    return DistributedContext.from_torch().allgather_local(ranks.rank) if is_last else None


def process_groups(_):
    """Returns the patience of each group's gloo, in hours."""
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout / timedelta(hours=1) for group in groups]


def reduced(ranks):
    seen = []
    reducers = Reducers()
    values = reducers.wrap(lambda values: seen.append(list(values)) or len(values), "count", for_validation=False)
    mean = reducers.wrap(Mean(), "mean")
    reducers.wrap(lambda values: {"nothing": len(values)}, for_training=False)
    reducers.reset(for_training=True)
    for index in range(ranks.rank + 1):
        values.update((ranks.rank, index))
        mean.update(float(ranks.rank))
    training = reducers.reduce(True, ranks)
    reducers.reset(for_training=False)
    mean.update(10.0)
    validation = reducers.reduce(False, ranks)
    return {"training": training, "seen": seen, "validation": validation}


def reduced_by_the_last_ranks(ranks):
    """The first rank has nothing to say, and its reducer could not even say so."""
    reducers = Reducers()
    worst = reducers.wrap(max, "worst")
    contributes = ranks.rank > 0
    if contributes:
        worst.update(ranks.rank)
    return reducers.reduce(True, ranks, contributes)


def fails_on_rank_0(ranks):
    reducers = Reducers()
    reducers.wrap(lambda values: 1 / 0, "auc").update(1)
    try:
        return reducers.reduce(True, ranks)
    except ZeroDivisionError:
        return "ZeroDivisionError"


def different_reducers(ranks):
    reducers = Reducers()
    if ranks.rank == 0:
        reducers.wrap(max, "worst")
    return reducers.reduce(True, ranks)


def averaged(ranks):
    averager = MetricAverager()
    for _ in range(ranks.rank + 1):
        averager.add({"loss": torch.tensor(float(ranks.rank)), "const": 3})
    if ranks.rank == 1:
        averager.add({"only_one": 7.0})
    return averager.average(ranks)


def averaged_again(ranks):
    averager = MetricAverager(strict_keys=True)
    averager.add({"loss": 1.0})
    averager.average(ranks)
    averager.add({"other": float(ranks.rank)})
    return averager.average(ranks)


def averaged_by_the_last_rank(ranks):
    averager = MetricAverager(strict_keys=True)
    contributes = ranks.rank == ranks.size - 1
    averager.add({"loss": float(ranks.rank)} if contributes else {"of no interest": 1.0})
    return averager.average(ranks, contributes)


def averaged_without_the_first_ranks_batches(ranks):
    averager = MetricAverager(strict_keys=True)
    if ranks.rank > 0:
        averager.add({"loss": float(ranks.rank)})
    return averager.average(ranks)


def validated_differently(ranks):
    averager = MetricAverager(strict_keys=True)
    averager.add({"loss": 1.0} if ranks.rank == 0 else {"loss": 1.0, "acc": 1.0})
    return averager.average(ranks)


CHECKS = [
    positions,
    objects,
    objects_of_a_node,
    one_node_alone,
    process_groups,
    reduced,
    reduced_by_the_last_ranks,
    fails_on_rank_0,
    different_reducers,
    averaged,
    averaged_again,
    averaged_by_the_last_rank,
    averaged_without_the_first_ranks_batches,
    validated_differently,
]


def run_rank(rank, size, folder):
    node = {"LOCAL_RANK": rank % RANKS_PER_NODE, "LOCAL_WORLD_SIZE": RANKS_PER_NODE}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": size, **node}.items()})
    before = DistributedContext.from_torch()
    results = {"before the process group": positions(before)}
    try:
        before.allgather(1)
    except InvalidTrialError as error:
        results["collective before the process group"] = str(error)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{size}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )
    ranks = DistributedContext.from_torch()
    for check in CHECKS:
        try:
            results[check.__name__] = check(ranks)
        except InvalidTrialError as error:
            results[check.__name__] = f"InvalidTrialError: {error}"
    Path(folder, f"{size}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run_worlds(folder):
    forking = multiprocessing.get_context("fork")
    for size in SIZES:
        processes = [forking.Process(target=run_rank, args=(rank, size, folder), daemon=True) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    run_worlds(sys.argv[1])


# -- what the ranks found ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """For each size, what each rank found."""
    folder = tmp_path_factory.mktemp("worlds")
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name not in NODE}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program = subprocess.run(
        [sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=60
    )
    found = {}
    for size in SIZES:
        for rank in range(size):
            path = folder / f"{size}-{rank}.json"
            assert path.exists(), program.stderr
            found.setdefault(size, []).append(json.loads(path.read_text()))
    return found


@pytest.fixture(params=SIZES)
def size(request):
    return request.param


@pytest.fixture
def each_rank(worlds, size):
    """Returns what each rank found in a check."""
    return lambda check: [results[check] for results in worlds[size]]


@pytest.fixture
def every_rank(each_rank):
    """Returns what all ranks found in a check, which has to be the same."""

    def same(check):
        found = each_rank(check)
        assert all(result == found[0] for result in found), found
        return found[0]

    return same


def test_a_rank_knows_its_place_and_that_of_its_node(each_rank, size):
    places = [[rank, size, rank % 2, 2, rank // 2, size // 2] for rank in range(size)]
    assert each_rank("positions") == [[place, place] for place in places]


def test_a_rank_knows_its_place_before_the_process_group_exists(each_rank):
    assert each_rank("before the process group") == each_rank("positions")


def test_a_collective_before_the_process_group_says_what_to_call(every_rank):
    assert "call deepspeed.init_distributed()" in every_rank("collective before the process group")


def test_objects_travel_between_all_ranks(each_rank, size):
    found = each_rank("objects")
    assert [result["allgather"] for result in found] == [[1000 * rank for rank in range(size)]] * size
    assert [result["gather"] for result in found] == [list(range(size))] + [None] * (size - 1)
    assert [result["broadcast"] for result in found] == ["from 0"] * size


def test_objects_travel_between_the_ranks_of_a_node(each_rank, size):
    found = each_rank("objects_of_a_node")
    nodes = [[rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(size)]
    assert [result["allgather"] for result in found] == nodes
    assert [result["gather"] for result in found] == [
        node if rank % 2 == 0 else None for rank, node in enumerate(nodes)
    ]
    assert [result["broadcast"] for result in found] == [f"from {first}" for first, _ in nodes]


def test_the_ranks_of_a_node_need_no_other_node(each_rank, size):
    assert each_rank("one_node_alone")[-2:] == [[size - 2, size - 1]] * 2


def test_objects_travel_in_groups_of_their_own_which_are_patient(each_rank, size):
    default, day = [20 / 3600], 24.0
    # One for all ranks and, where there are several nodes, one for each. The last node made its own a second time, or
    # that of all, where there is only one node: it asked through a second context.
    own = [1, 1] if size == 2 else [2, 2, 3, 3]
    assert each_rank("process_groups") == [pytest.approx(default + [day] * (count + (size == 2))) for count in own]


def test_a_function_is_given_the_values_of_all_ranks_rank_by_rank(each_rank, size):
    found = each_rank("reduced")
    values = [[rank, index] for rank in range(size) for index in range(rank + 1)]
    assert [result["seen"] for result in found] == [[values]] + [[]] * (size - 1)  # rank 0 does it for all
    assert [result["training"]["count"] for result in found] == [len(values)] * size


def test_a_reducer_of_the_users_own_is_reduced_over_all_ranks(each_rank, size):
    values = [rank for rank in range(size) for _ in range(rank + 1)]
    means = [result["training"]["mean"] for result in each_rank("reduced")]
    assert means == [pytest.approx(sum(values) / len(values))] * size


def test_training_values_are_not_in_the_validation(each_rank, size):
    assert [result["validation"] for result in each_rank("reduced")] == [{"mean": 10.0, "nothing": 0.0}] * size


def test_a_reducer_that_fails_on_rank_0_is_an_error_on_all(each_rank, size):
    told = "InvalidTrialError: A reducer failed on rank 0: ZeroDivisionError('division by zero')."
    assert each_rank("fails_on_rank_0") == ["ZeroDivisionError"] + [told] * (size - 1)


def test_ranks_that_do_not_contribute_are_left_out_of_a_reduction(every_rank, size):
    assert every_rank("reduced_by_the_last_ranks") == {"worst": size - 1}


def test_ranks_with_different_reducers_are_told_on_every_rank(every_rank):
    assert "different reducers (rank 0: worst; rank 1: none)" in every_rank("different_reducers")


def test_a_rank_counts_by_its_batches_in_an_average(every_rank, size):
    values = [rank for rank in range(size) for _ in range(rank + 1)]
    assert every_rank("averaged") == {"loss": pytest.approx(sum(values) / len(values)), "const": 3.0, "only_one": 7.0}


def test_the_next_average_starts_anew_on_all_ranks(every_rank, size):
    assert every_rank("averaged_again") == {"other": (size - 1) / 2}


def test_ranks_that_do_not_contribute_are_left_out_of_an_average(every_rank, size):
    assert every_rank("averaged_by_the_last_rank") == {"loss": size - 1}


def test_a_rank_without_batches_is_left_out_of_an_average(every_rank, size):
    assert every_rank("averaged_without_the_first_ranks_batches") == {"loss": size / 2}


def test_ranks_with_different_validation_metrics_are_told_on_every_rank(every_rank):
    message = every_rank("validated_differently")
    assert message.startswith("InvalidTrialError")
    assert "on rank 1 than on rank 0 (new: acc)" in message
