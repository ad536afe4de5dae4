"""The cluster model as a world."""

import random
from statistics import linear_regression, median

import pytest

from benchmarks.replay.cluster import CLUSTERS, FIRST_STEP_SHARE, ClusterWorld, zero_of
from benchmarks.replay.cluster_model import Cluster, Transformer, Zero
from benchmarks.replay.recorded import read_table
from benchmarks.replay.run import TABLES, world_of
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome

MODEL = Transformer(layers=24, hidden=2048, sequence=2048, recompute=False)
SMALL, LARGE = Cluster(8, MODEL), Cluster(1024, MODEL)


@pytest.fixture(scope="module")
def world():
    return ClusterWorld("1.3B on 8", CLUSTERS["1.3B on 8"])


def test_the_models_are_as_large_as_they_are_called():
    assert [round(cluster.model.params / 1e9, 1) for cluster in CLUSTERS.values()] == [1.2, 12.6, 64.4]


def test_states_take_what_zeros_paper_says():
    """Figure 1 there: 16 bytes a parameter, of which stages 1 to 3 divide the optimizer's 12, gradients, weights."""
    model, shards = Transformer(24, 4096, 2048, recompute=True), 64
    cluster, params = Cluster(shards, model), model.params
    # A bucket of stage 0's reduction, which has no setting; the others' have one element here.
    buffers = (2 * 5e8, 4, 4, 4)

    def states(stage, **offload):
        zero = Zero(stage, reduce_bucket=1, allgather_bucket=1, max_live=1, prefetch_bucket=0, **offload)
        return cluster.initialized_bytes(zero) - 1.5e9 + cluster.step_bytes(zero, 0) - buffers[stage]

    for stage, expected in enumerate((16, 4 + 12 / shards, 2 + 14 / shards, 16 / shards)):
        assert states(stage) == pytest.approx(expected * params)
    # Stage 1 keeps every gradient until the optimizer's step, on the device.
    for stage, expected in ((1, 4), (2, 2), (3, 2 / shards)):
        assert states(stage, offload_optimizer=True) == pytest.approx(expected * params)


@pytest.mark.parametrize("stage", range(4))
def test_larger_micro_batches_are_more_efficient_and_need_more(stage):
    throughputs = [size / SMALL.step_seconds(Zero(stage), size, 1) for size in (1, 4, 16)]
    assert throughputs == sorted(throughputs)
    assert SMALL.step_bytes(Zero(stage), 2) - SMALL.step_bytes(Zero(stage), 1) == pytest.approx(MODEL.activation_bytes)


def test_stage_3_communicates_most_where_the_network_is_slow():
    seconds = [LARGE.step_seconds(Zero(stage), 1, 1) for stage in (1, 2, 3)]
    assert seconds[2] == max(seconds)


def test_small_buckets_cost_a_latency_each_and_overlap_hides_communication():
    assert LARGE.step_seconds(Zero(2, reduce_bucket=5e6), 1, 1) > LARGE.step_seconds(Zero(2, reduce_bucket=5e8), 1, 1)
    assert LARGE.step_seconds(Zero(2, overlap=True, reduce_bucket=5e7), 16, 1) < LARGE.step_seconds(
        Zero(2, reduce_bucket=5e7), 16, 1
    )


def test_offload_saves_memory_and_costs_time():
    plain, offloaded = Zero(2), Zero(2, offload_optimizer=True)
    assert SMALL.initialized_bytes(offloaded) < SMALL.initialized_bytes(plain)
    assert SMALL.step_seconds(offloaded, 4, 1) > SMALL.step_seconds(plain, 4, 1)


def test_what_is_off_the_formulas_stays_the_same(world):
    again = ClusterWorld("1.3B on 8", CLUSTERS["1.3B on 8"])
    assert again.truth(world.submitted) == world.truth(world.submitted)
    by_formula = 8 / SMALL.step_seconds(zero_of(world.submitted.knobs), 1, 1)
    assert world.truth(world.submitted) != by_formula


@pytest.mark.long
def test_each_seed_of_a_replay_has_a_cluster_of_its_own_and_all_have_the_same_table(tmp_path):
    one, again, other = (world_of("1.3B on 8", tmp_path, seed) for seed in (3, 3, 4))
    assert one.truth(one.submitted) == again.truth(again.submitted) != other.truth(other.submitted)
    assert world_of("convnet", TABLES, 3) is world_of("convnet", TABLES, 4)


def test_a_trial_reads_the_truth_with_noise_and_shows_its_memory(world):
    readings = [world.run(world.submitted, random.Random(seed)) for seed in range(50)]
    throughputs = [result.metrics["throughput"] for result in readings]
    assert sum(throughputs) / 50 == pytest.approx(world.truth(world.submitted), rel=0.01)
    memory = readings[0].memory
    assert memory.peak[0] - memory.after_initialize[0] < memory.available[0]


def test_what_needs_more_than_a_device_has_ends_out_of_memory(world):
    too_large = world.candidate(world.submitted.knobs, 64)
    assert world.truth(too_large) is None
    assert world.run(too_large, random.Random(0)).outcome is Outcome.OUT_OF_MEMORY


def test_a_trial_makes_the_steps_that_a_real_one_makes(world):
    result = world.run(world.submitted, random.Random(0))
    step = result.metrics["latency"]
    assert result.metrics["measured_steps"] == StepWindow().min_steps
    assert result.phases["steps"] == pytest.approx((StepWindow().end_step - 1) * step, rel=0.1)


@pytest.mark.parametrize("table", sorted(TABLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_first_step_takes_little_more_of_another_one_in_the_recorded_tables_either(table):
    seconds: dict[int, list[tuple[float, float]]] = {}
    for rows in read_table(table).rows.values():
        for row in rows:
            if row.outcome is Outcome.COMPLETED:
                size = row.candidate.micro_batch_size
                seconds.setdefault(size, []).append((median(row.step_times), row.phases["first_step"]))
    points = [tuple(map(median, zip(*each, strict=True))) for each in seconds.values()]
    share, constant = linear_regression(*zip(*points, strict=True))
    assert 1 < share <= FIRST_STEP_SHARE
    assert 0 < constant < 0.1


def test_a_plan_of_a_cluster_is_off_by_some_percent_and_orders_the_arms():
    world = ClusterWorld("1.3B on 8", CLUSTERS["1.3B on 8"], seed=3)
    world.plan()
    expected, arms = world.problem.expected, world.problem.space.arms
    assert len(expected) == len(world.problem.foreseen) == len(arms)
    first = max(expected, key=lambda arm: arm.samples_per_s)
    assert [arm for arm in expected if arm.is_first] == [first]
    for arm, planned in zip(arms, expected, strict=True):
        real = world.truth(world.candidate(arm.family(0), max(1, planned.micro_batch // 2)))
        assert real is not None
        assert 0.5 * real < planned.samples_per_s < 2 * real
