"""The searches that are compared, on the cluster model and on a small table."""

import math
import random

import pytest
from small_table import small_table

from benchmarks.replay.cluster import CLUSTERS, ClusterWorld
from benchmarks.replay.deepspeed_rule import DeepSpeedRule
from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import METHODS, create
from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.search.methods import SearchSettings


@pytest.fixture(scope="module")
def cluster():
    return ClusterWorld("13B on 64", CLUSTERS["13B on 64"])


def asked(method, world, seed=1, max_trials=12):
    replay = simulate(create(method, world, seed, max_trials), world, seed)
    return [trial.candidate for trial in replay.trials]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_searches_the_space_and_keeps_to_its_budget(method, cluster):
    candidates = asked(method, cluster)
    assert 1 <= len(candidates) <= 11
    assert all(cluster.problem.space.index(candidate.knobs) is not None for candidate in candidates)


@pytest.mark.parametrize("method", ["asha", "binary", "random", "tpe", "deepspeed"])
def test_a_table_is_searched_as_well(method):
    assert asked(method, TableWorld(small_table()))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_searches_the_same_way(method, cluster):
    assert asked(method, cluster) == asked(method, cluster)


@pytest.mark.parametrize("method", ["tpe", "deepspeed"])
def test_no_peer_runs_a_trial_twice(method, cluster):
    candidates = asked(method, cluster, max_trials=60)
    assert len({(candidate.family, candidate.micro_batch_size) for candidate in candidates}) == len(candidates)


class TestDeepSpeedRule:
    def test_it_passes_over_stages_whose_states_do_not_fit_and_drops_offload(self, cluster):
        candidates = asked("deepspeed", cluster, max_trials=60)
        assert {candidate.zero_stage for candidate in candidates} == {2, 3}  # it takes bf16 for fp32
        assert not any("offload_optimizer" in candidate.knobs["zero_optimization"] for candidate in candidates)

    def test_stages_come_in_order_and_a_new_one_starts_at_the_largest_size_of_those_before(self, cluster):
        candidates = asked("deepspeed", cluster, max_trials=60)
        stages = [candidate.zero_stage for candidate in candidates]
        assert stages == sorted(stages)
        default = cluster.candidate(candidates[0].knobs, 1)
        ran = [
            candidate.micro_batch_size
            for candidate in candidates
            if candidate.family == default.family and cluster.truth(candidate) is not None
        ]
        assert candidates[stages.index(3)].micro_batch_size == max(ran)

    def test_it_starts_with_the_users_size_then_tries_the_largest_that_it_calculates(self, cluster):
        rule = DeepSpeedRule(SearchSettings(metric="throughput"), cluster.problem, largest_size=64)
        first = rule.ask()
        assert first.micro_batch_size == 1
        assert rule.ask() is None  # one at a time
        rule.tell(first, cluster.run(first, random.Random(0)))
        profile, shards = cluster.problem.profile, 64
        left = profile.gpu_mem - profile.num_params * (4 + (4 + 8) / shards)
        assert rule.ask().micro_batch_size == math.ceil(1.05 * (left // profile.activation_mem_per_gpu))
