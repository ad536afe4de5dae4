import itertools
import random
from dataclasses import replace

import pytest

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel

MIB = 2**20
GIB = 2**30
HEADROOM = 0.05
PROFILE = ModelProfile(
    num_params=500_000_000,
    trainable_num_params=500_000_000,
    activation_mem_per_gpu=200 * MIB,
    gpu_mem=24 * GIB,
    data_parallel_size=4,
    flops_per_sample=1e12,
)
BASE = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def new_model(profile=PROFILE, base=BASE, device="cuda"):
    return MemoryModel(MemoryBasis(profile, base, slots=4, device=device))


def candidate(size, stage=2, **zero):
    zero = {"reduce_bucket_size": 50_000_000, **zero}
    return Candidate(
        knobs={"zero_optimization": {"stage": stage, **zero}}, micro_batch_size=size, slots=4, data_parallel_size=4
    )


def result(outcome, above=0, available=20 * GIB):
    memory = Memory()
    if outcome is Outcome.COMPLETED:
        # The second rank takes most, and has least.
        memory = Memory(
            peak=[3 * GIB + above - 5 * MIB, 3 * GIB + above],
            after_initialize=[3 * GIB, 3 * GIB],
            available=[available + 5 * MIB, available],
        )
    return TrialResult(
        trial_id="s-1", number=1, purpose=Purpose.SEARCH, config_hash="0", outcome=outcome, memory=memory
    )


def ran(above, available=20 * GIB):
    return result(Outcome.COMPLETED, int(above), available)


OUT_OF_MEMORY = result(Outcome.OUT_OF_MEMORY)


def truth(size, stage=2):
    """A world that departs from the formulas: more for each sample, much more beside them and when they have gone."""
    beside = (4 - stage) * GIB / 2
    return beside + max(1.6 * size * 200 * MIB, beside)


def test_before_anything_ran_the_formulas_speak_and_the_interval_is_wide():
    prediction = new_model().above_initialize(candidate(8))
    assert prediction.measured == 0
    assert prediction.low < truth(8) < prediction.high
    assert prediction.high > 1.3 * prediction.low


def test_two_measured_trials_of_an_arm_bring_the_prediction_close_to_its_next_one():
    model = new_model()
    for size in (2, 6):
        model.observe(candidate(size), ran(truth(size)))
    prediction = model.above_initialize(candidate(16))
    assert prediction.measured == 2
    assert prediction.value == pytest.approx(truth(16), rel=0.05)
    assert prediction.low < truth(16) < prediction.high
    assert prediction.high - prediction.low < 0.5 * truth(16)


def test_what_one_arm_shows_of_a_sample_counts_for_the_others():
    model = new_model()
    before = model.bytes_per_sample(candidate(8, stage=3))
    for size in (2, 6, 12):
        model.observe(candidate(size), ran(truth(size)))
    # It is the most that a sample may take, because a sweep's group goes on by it.
    assert 1.6 * 200 * MIB < model.bytes_per_sample(candidate(8, stage=3)) < 1.15 * 1.6 * 200 * MIB
    assert abs(before - 1.6 * 200 * MIB) > abs(model.bytes_per_sample(candidate(8, stage=3)) - 1.6 * 200 * MIB)


def test_sizes_at_which_the_update_is_the_peak_say_nothing_of_a_sample():
    model = new_model()
    for size in (1, 2, 3):
        model.observe(candidate(size), ran(2 * GIB))
    assert model.above_initialize(candidate(2)).value == pytest.approx(2 * GIB, rel=0.05)
    # A line through them would be flat.
    assert model.bytes_per_sample(candidate(8)) > 1.2 * 200 * MIB
    assert model.above_initialize(candidate(40)).value > 8 * GIB


def test_the_memory_of_the_rank_that_takes_most_counts():
    model = new_model()
    for size in range(2, 20, 2):
        model.observe(candidate(size), ran(truth(size)))
    assert model.above_initialize(candidate(10)).value == pytest.approx(truth(10), rel=0.01)


def test_the_profile_trial_calibrates_and_is_no_trial_of_its_arm():
    model = new_model()
    own = Candidate(micro_batch_size=1, slots=4)
    model.observe_profile(own, ran(6 * GIB, available=15 * GIB))
    prediction = model.above_initialize(own)
    assert prediction.measured == 0
    assert prediction.value == pytest.approx(6 * GIB, rel=0.2)
    assert prediction.value > new_model().above_initialize(own).value
    assert model.available(own) == pytest.approx(15 * GIB, rel=0.01)


@pytest.mark.parametrize(
    "outcome",
    [Outcome.CRASHED, Outcome.INVALID, Outcome.TIMED_OUT, Outcome.DIVERGED, Outcome.TOO_SLOW, Outcome.CANCELLED],
)
def test_of_the_failures_only_out_of_memory_teaches_anything(outcome):
    taught, untaught = new_model(), new_model()
    taught.observe(candidate(4), result(outcome))
    for size in (1, 4, 64):
        assert taught.above_initialize(candidate(size)) == untaught.above_initialize(candidate(size))
        chances = [model.probability_fits(candidate(size), HEADROOM) for model in (taught, untaught)]
        assert chances[0] == chances[1]


def test_a_trial_that_runs_out_of_memory_bounds_its_arm():
    model = new_model()
    model.observe(candidate(20), OUT_OF_MEMORY)
    assert model.probability_fits(candidate(20), HEADROOM) == 0
    assert model.probability_fits(candidate(21), HEADROOM) == 0
    # Larger buckets and overlap need more.
    assert model.probability_fits(candidate(20, reduce_bucket_size=100_000_000), HEADROOM) == 0
    assert model.probability_fits(candidate(20, overlap_comm=True), HEADROOM) == 0
    assert model.probability_fits(candidate(2), HEADROOM) > 0


def test_a_trial_that_runs_out_of_memory_makes_arms_that_need_more_less_likely_to_fit():
    model = new_model()
    stage1, stage3 = candidate(12, stage=1), candidate(12, stage=3)
    before = model.probability_fits(stage1, HEADROOM), model.above_initialize(stage1).value
    model.observe(stage3, OUT_OF_MEMORY)
    assert model.probability_fits(stage1, HEADROOM) < before[0]
    assert model.above_initialize(stage1).value > before[1]


def test_running_out_of_memory_moves_the_prediction_above_what_was_there():
    model = new_model()
    unlikely = candidate(20)
    before = model.above_initialize(unlikely).value
    assert before < 18 * GIB
    model.observe(unlikely, OUT_OF_MEMORY)
    assert model.above_initialize(unlikely).value > before


def test_a_failure_that_was_expected_changes_little():
    model = new_model()
    for size in (2, 6, 12):
        model.observe(candidate(size), ran(truth(size)))
    before = model.above_initialize(candidate(12)).value
    model.observe(candidate(200), OUT_OF_MEMORY)
    assert model.above_initialize(candidate(12)).value == pytest.approx(before, rel=0.01)


def test_what_needs_no_more_than_a_completed_trial_of_its_family_fits():
    model = new_model()
    model.observe(candidate(30), ran(19.9 * GIB))
    assert all(model.probability_fits(candidate(size), HEADROOM) > 0.99 for size in (1, 15, 30))
    assert model.probability_fits(candidate(60), HEADROOM) < 0.1


def test_what_completed_once_and_ran_out_of_memory_another_time_does_not_fit():
    model = new_model()
    for result in (ran(19.9 * GIB), OUT_OF_MEMORY):
        model.observe(candidate(30), result)
    assert model.probability_fits(candidate(30), HEADROOM) == 0
    assert model.largest_micro_batch(candidate(1).knobs, candidate, 100, HEADROOM, 0.9) == 29


def test_the_users_own_configuration_and_knobs_that_say_it_again_are_one_family():
    model = new_model(base={**BASE, "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000}})
    model.observe(Candidate(micro_batch_size=30, slots=4), ran(19.9 * GIB))
    assert model.probability_fits(candidate(30), HEADROOM) > 0.99


def test_a_smaller_size_of_a_family_is_never_less_likely_to_fit():
    rng = random.Random(0)
    for _ in range(20):
        model = new_model()
        for _ in range(8):
            size, stage = rng.randrange(1, 80), rng.randrange(4)
            fits = truth(size, stage) < 20 * GIB
            model.observe(candidate(size, stage), ran(truth(size, stage)) if fits else OUT_OF_MEMORY)
        for stage in range(4):
            chances = [model.probability_fits(candidate(size, stage), HEADROOM) for size in range(1, 100, 3)]
            assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(chances))


def test_headroom_makes_a_candidate_less_likely_to_fit():
    model = new_model()
    model.observe(candidate(4), ran(truth(4)))
    assert model.probability_fits(candidate(50), headroom=0.3) < model.probability_fits(candidate(50), headroom=0.0)


def test_the_largest_micro_batch_is_the_last_one_that_fits_with_the_confidence():
    model = new_model()
    for size in (2, 6, 12):
        model.observe(candidate(size), ran(truth(size)))
    knobs = candidate(1).knobs
    largest = model.largest_micro_batch(knobs, candidate, 1000, HEADROOM, 0.9)
    assert model.probability_fits(candidate(largest), HEADROOM) >= 0.9
    assert model.probability_fits(candidate(largest + 1), HEADROOM) < 0.9
    assert truth(largest) < 20 * GIB
    assert truth(largest * 1.3) > 0.95 * 20 * GIB
    assert model.largest_micro_batch(knobs, candidate, 5, HEADROOM, 0.9) == 5
    assert model.largest_micro_batch(knobs, candidate, 1000, HEADROOM, 0.5) >= largest


def test_no_size_fits_where_the_states_leave_nothing():
    model = new_model(replace(PROFILE, gpu_mem=2 * GIB))
    knobs = candidate(1, stage=0).knobs
    assert model.largest_micro_batch(knobs, lambda size: candidate(size, stage=0), 100, HEADROOM, 0.9) == 0


def test_where_nobody_knows_a_limit_everything_fits():
    model = new_model(replace(PROFILE, gpu_mem=0), device="cpu")
    assert model.available(candidate(1)) is None
    assert model.probability_fits(candidate(1000), HEADROOM) == 1
    model.observe(candidate(500), OUT_OF_MEMORY)
    assert model.probability_fits(candidate(500), HEADROOM) == 0
    assert model.probability_fits(candidate(100), HEADROOM) == 1


def test_what_an_arm_leaves_follows_for_others_from_the_states_that_they_have():
    model = new_model()
    model.observe(candidate(2, stage=1), ran(truth(2, 1), available=12 * GIB))
    stage3 = model.available(candidate(2, stage=3))
    # Stage 3 keeps a quarter of the 16-bit parameters, and its bucket from the beginning.
    assert stage3 == pytest.approx(12 * GIB + 0.75 * 1e9 - 0.25e9 - 0.1e9, rel=0.01)
    model.observe(candidate(2, stage=3), ran(truth(2, 3), available=14 * GIB))
    assert model.available(candidate(2, stage=3)) == pytest.approx(14 * GIB, abs=MIB)


def test_more_memory_than_was_left_on_paper_is_learned_from_trials_that_completed():
    """On a CPU memory that ranks share is in the peak and not in the budget."""
    profile = replace(PROFILE, activation_mem_per_gpu=MIB, gpu_mem=200 * MIB, num_params=10**6)
    model = new_model(replace(profile, trainable_num_params=10**6), base={}, device="cpu")
    small = [candidate(size, reduce_bucket_size=10**6) for size in (2, 20, 40)]
    for each in small:
        model.observe(each, ran((110 + 1.5 * each.micro_batch_size) * MIB, available=150 * MIB))
    # 170 MiB have run with 150 available.
    assert model.probability_fits(candidate(38, reduce_bucket_size=500_000), headroom=0) > 0.5


def test_a_group_keeps_free_what_may_not_be_had_until_trials_have_had_it():
    model = new_model(replace(PROFILE, gpu_mem=200 * MIB, activation_mem_per_gpu=MIB), device="cpu")
    first = candidate(2, reduce_bucket_size=10**6)
    model.observe(first, ran(60 * MIB, available=160 * MIB))
    unknown = model.group_headroom(first, headroom=0)
    # The stack of a thread is among what cannot be had.
    assert 8 / 160 < unknown < 24 / 160
    assert model.group_headroom(first, headroom=0.1) > unknown + 0.09
    model.observe(candidate(80, reduce_bucket_size=10**6), ran(158 * MIB, available=160 * MIB))
    assert model.group_headroom(first, headroom=0) < unknown / 2


def test_the_model_is_a_function_of_what_it_was_told():
    one, other = new_model(), new_model()
    for model in (one, other):
        for size in (3, 9):
            model.observe(candidate(size), ran(truth(size)))
        model.observe(candidate(90), OUT_OF_MEMORY)
        model.above_initialize(candidate(7, stage=3))
    assert one.above_initialize(candidate(40)) == other.above_initialize(candidate(40))
    assert one.probability_fits(candidate(40), HEADROOM) == other.probability_fits(candidate(40), HEADROOM)


def test_the_interval_holds_nine_of_ten_noisy_measurements():
    rng = random.Random(3)
    inside = []
    for _ in range(12):
        model = new_model()
        for trial in range(30):
            size, stage = rng.randrange(1, 40), rng.randrange(4)
            value = truth(size, stage) * rng.gauss(1, 0.05)
            if trial >= 10:
                prediction = model.above_initialize(candidate(size, stage))
                inside.append(prediction.low <= value <= prediction.high)
            model.observe(candidate(size, stage), ran(value, available=10**12))
    assert 0.82 <= sum(inside) / len(inside) <= 0.97
