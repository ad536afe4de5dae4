"""A recorded table as a world."""

import math
import random

import pytest
from small_table import HEAD, LARGE_BUCKET, PLAIN, SMALL_BUCKET, candidate, failed, ran, small_table, table

from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.records.result import Outcome


@pytest.fixture
def world():
    return TableWorld(small_table())


def run(world, knobs, size, seed=0):
    return world.run(candidate(knobs, size), random.Random(seed))


def test_the_space_is_that_of_the_recorded_families_with_deepspeeds_default_first(world):
    plain, one = world.problem.space.arms
    assert [plain.family(0), plain.size] == [PLAIN, 1]
    assert [one.family(index) for index in range(one.size)] == [LARGE_BUCKET, SMALL_BUCKET]


def test_a_table_that_is_no_grid_is_refused():
    with pytest.raises(ValueError, match="no full grid"):
        TableWorld(
            table(
                ran({"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1}}, 4, 1.0, 1),
                ran({"zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 2}}, 4, 1.0, 1),
            )
        )


def test_searches_get_the_accumulation_of_the_table_and_a_free_batch(world):
    assert world.problem.base_config["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in world.problem.base_config
    assert world.problem.train_batch_size is None
    assert HEAD.base_config["gradient_accumulation_steps"] == 2


def test_the_submitted_configuration_is_the_nearest_family_of_its_stage(world):
    assert world.submitted == candidate(LARGE_BUCKET, 4)


def test_throughput_is_by_cpu_time(world):
    assert run(world, PLAIN, 4).metrics["throughput"] == pytest.approx(100.0)
    assert world.truth(candidate(PLAIN, 4)) == pytest.approx(100.0)


def test_a_trial_reads_the_truth_with_a_disturbance_of_any_repeat():
    noisy = table(ran(PLAIN, 4, 90.0, 1), ran(PLAIN, 4, 110.0, 1, repeat=1), ran(PLAIN, 8, 150.0, 1), failed(PLAIN, 16))
    world = TableWorld(noisy)
    for size in (4, 6, 8):
        truth = world.truth(candidate(PLAIN, size))
        readings = {round(run(world, PLAIN, size, seed).metrics["throughput"] / truth, 6) for seed in range(20)}
        assert sorted(readings) == pytest.approx([math.exp(-world.noise), math.exp(world.noise)])


def test_metrics_and_step_times_follow_from_the_throughput(world):
    result = run(world, PLAIN, 8)
    assert result.metrics["latency"] == pytest.approx(16 / 200)
    assert result.metrics["FLOPS_per_gpu"] == pytest.approx(100 * 200 / 2)
    assert result.step_times == pytest.approx([0.08, 0.08, 0.32])


def test_between_recorded_sizes_step_time_and_memory_are_linear(world):
    step_4, step_8 = 4 / 100, 8 / 200
    assert world.truth(candidate(PLAIN, 6)) == pytest.approx(6 / ((step_4 + step_8) / 2))
    memory = run(world, PLAIN, 6).memory
    assert max(memory.peak) - memory.after_initialize[0] == 150


def test_what_grows_out_of_the_memory_before_the_size_that_failed_does_not_fit(world):
    assert world.truth(candidate(PLAIN, 11)) is not None  # 275 of 300
    assert world.truth(candidate(PLAIN, 12)) is None
    assert run(world, PLAIN, 12).outcome is Outcome.OUT_OF_MEMORY


def test_what_one_family_of_an_arm_had_the_others_may_have():
    def fits(others_need, knobs, size):
        growing = [(4, 100), (8, 200)]  # 25 a sample; 300 are available
        world = TableWorld(
            table(
                *(ran(each, size, 80.0, need) for each in (PLAIN, LARGE_BUCKET) for size, need in growing),
                *(failed(each, 16) for each in (PLAIN, LARGE_BUCKET)),
                ran(SMALL_BUCKET, 16, 80.0, others_need),
            )
        )
        return world.truth(candidate(knobs, size)) is not None

    assert fits(290, LARGE_BUCKET, 11)
    assert not fits(290, LARGE_BUCKET, 12)
    assert fits(390, LARGE_BUCKET, 15)
    assert not fits(390, LARGE_BUCKET, 16)
    assert not fits(390, PLAIN, 12)


def test_beyond_the_recorded_sizes_nothing_fits(world):
    assert world.truth(candidate(SMALL_BUCKET, 16)) == pytest.approx(160)
    assert run(world, SMALL_BUCKET, 17).outcome is Outcome.OUT_OF_MEMORY
    assert world.largest_size == 16


def test_a_size_that_failed_once_may_run_in_a_trial_but_is_no_answer(world):
    outcomes = {run(world, LARGE_BUCKET, 8, seed).outcome for seed in range(20)}
    assert outcomes == {Outcome.COMPLETED, Outcome.OUT_OF_MEMORY}
    assert world.truth(candidate(LARGE_BUCKET, 8)) is None


def test_the_best_may_lie_between_recorded_sizes(world):
    sizes = range(1, 17)
    assert world.best == max(filter(None, map(world.truth, world.candidates(sizes))))
    assert world.best > 200


def test_failures_are_counted_over_the_recorded_grid(world):
    assert world.share_that_fails == pytest.approx(3 / 9)


def test_noise_is_pooled_over_the_candidates_that_were_repeated():
    world = TableWorld(table(ran(PLAIN, 4, 90.0, 1), ran(PLAIN, 4, 110.0, 1, repeat=1), failed(PLAIN, 8)))
    assert world.noise == pytest.approx(0.1419, abs=1e-4)  # ln(110 / 90) / sqrt(2)


def test_what_runs_out_of_memory_costs_its_own_phases(world):
    assert sum(run(world, PLAIN, 16).phases.values()) == 7.0


def test_layouts_are_arms_and_each_has_its_own_replicas():
    whole = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 1}}
    divided = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    world = TableWorld(table(*(ran(knobs, size, 80.0, 100) for knobs in (divided, whole) for size in (4, 8))))
    assert [arm.knobs for arm in world.problem.space.arms] == [whole, divided]
    assert world.submitted == candidate(whole, 4)
    for knobs, replicas in ((whole, 2), (divided, 1)):
        asked = world.candidate(knobs, 8)
        assert asked.data_parallel_size == replicas
        metrics = world.run(asked, random.Random(0)).metrics
        assert metrics["throughput"] * metrics["latency"] == pytest.approx(8 * replicas)


def test_a_family_whose_every_trial_ended_with_an_error_does_so_at_all_sizes():
    broken = [failed(SMALL_BUCKET, size).model_copy(update={"outcome": Outcome.CRASHED}) for size in (4, 8)]
    world = TableWorld(table(*(ran(LARGE_BUCKET, size, 80.0, 100) for size in (4, 8)), *broken))
    assert {run(world, SMALL_BUCKET, size).outcome for size in (1, 4, 6, 8)} == {Outcome.CRASHED}
    assert world.truth(candidate(SMALL_BUCKET, 4)) is None
    assert run(world, LARGE_BUCKET, 6).outcome is Outcome.COMPLETED


def crashed(knobs, size, repeat=0):
    return failed(knobs, size, repeat).model_copy(update={"outcome": Outcome.CRASHED})


def test_a_row_that_ended_with_an_error_does_not_count_as_out_of_memory():
    growing = [ran(PLAIN, size, 80.0, need) for size, need in ((4, 100), (8, 200))]  # 25 a sample; 300 are available
    world = TableWorld(table(*growing, crashed(PLAIN, 16), failed(PLAIN, 32)))
    outcomes = {size: run(world, PLAIN, size).outcome for size in (8, 11, 13, 16, 20, 31, 32, 40)}
    assert [size for size, outcome in outcomes.items() if outcome is Outcome.COMPLETED] == [8, 11]
    assert [size for size, outcome in outcomes.items() if outcome is Outcome.CRASHED] == [13, 16, 20]
    assert [size for size, outcome in outcomes.items() if outcome is Outcome.OUT_OF_MEMORY] == [31, 32, 40]
    assert world.truth(candidate(PLAIN, 16)) is None


def test_an_error_below_the_sizes_that_ran_says_nothing_of_larger_ones():
    world = TableWorld(table(crashed(PLAIN, 4), *(ran(PLAIN, size, 80.0, 100) for size in (8, 16))))
    outcomes = [run(world, PLAIN, size).outcome for size in (4, 12, 20)]
    assert outcomes == [Outcome.CRASHED, Outcome.COMPLETED, Outcome.OUT_OF_MEMORY]


def test_a_size_that_ended_with_an_error_once_may_run_in_a_trial_but_is_no_answer():
    world = TableWorld(table(ran(PLAIN, 4, 80.0, 100), ran(PLAIN, 8, 80.0, 200), crashed(PLAIN, 8, repeat=1)))
    assert {run(world, PLAIN, 8, seed).outcome for seed in range(20)} == {Outcome.COMPLETED, Outcome.CRASHED}
    assert world.truth(candidate(PLAIN, 8)) is None
