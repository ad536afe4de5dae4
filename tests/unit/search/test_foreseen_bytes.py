import json
from dataclasses import asdict

import pytest

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine, nearest_arm
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel

MIB, GIB = 2**20, 2**30
PROFILE = ModelProfile(
    num_params=500_000_000,
    trainable_num_params=500_000_000,
    activation_mem_per_gpu=200 * MIB,
    gpu_mem=24 * GIB,
    data_parallel_size=4,
    flops_per_sample=1e12,
)
BUCKET = 50_000_000
BASE = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": BUCKET}}


def arm(stage=2, bucket=BUCKET, **changed):
    """A program that needs three times what the formulas expect of a sample, and keeps its outputs."""
    figures = {
        "initialize": SizeLine(1.5 * GIB),
        "backward": SizeLine(2.0 * GIB, 600 * MIB),
        "update": SizeLine(3.0 * GIB, 50 * MIB),
        **changed,
    }
    return ForeseenArm(ds_config=config(stage, bucket), **figures)


def config(stage, bucket=BUCKET):
    zero = {"stage": stage, "reduce_bucket_size": bucket}
    return {"bf16": {"enabled": True}, "zero_optimization": zero}


def candidate(size, stage=2, bucket=BUCKET):
    zero = {"stage": stage, "reduce_bucket_size": bucket}
    return Candidate(knobs={"zero_optimization": zero}, micro_batch_size=size, slots=4, data_parallel_size=4)


def new_model(*foreseen, device="cuda"):
    return MemoryModel(MemoryBasis(PROFILE, BASE, slots=4, device=device, foreseen=foreseen))


def ran(above):
    memory = Memory(peak=[3 * GIB + int(above)], after_initialize=[3 * GIB], available=[20 * GIB])
    return TrialResult(
        trial_id="s-1", number=1, purpose=Purpose.SEARCH, config_hash="0", outcome=Outcome.COMPLETED, memory=memory
    )


def test_a_line_goes_through_two_sizes():
    line = SizeLine.near({2: 110.0, 6: 130.0})
    assert (line.constant, line.per_sample) == (100.0, 5.0)
    assert line.at(10) == 150.0


def test_more_samples_never_take_less():
    assert SizeLine.near({2: 110.0, 6: 90.0}) == SizeLine(90.0)


def test_a_line_lies_between_the_holes_of_several_sizes():
    line = SizeLine.near({10: 100.0, 20: 220.0, 30: 280.0, 40: 400.0})
    assert line.per_sample == pytest.approx(9.6)
    assert line.at(25) == pytest.approx(250.0)


def test_pairs_of_samples_are_no_part_of_the_line():
    line = SizeLine.near({size: 100.0 + 5 * size + 3 * size**2 for size in (2, 4, 8)}, per_pair=3.0)
    assert line.at(100) == pytest.approx(100 + 500 + 30_000)


def test_an_arm_survives_its_file():
    assert ForeseenArm.from_json(json.loads(json.dumps(asdict(arm(host=5.0))))) == arm(host=5.0)


@pytest.mark.parametrize("size", [1, 4, 20])
def test_before_any_trial_the_foreseen_bytes_are_the_prediction(size):
    backward, update = 2.0 * GIB + 600 * MIB * size, 3.0 * GIB + 50 * MIB * size
    prediction = new_model(arm()).above_initialize(candidate(size))
    # A library's workspaces come to them. The larger moment of two uncertain ones is a little above both.
    workspace = 64 * MIB
    assert prediction.value == pytest.approx(max(backward, update) + workspace, rel=0.08)
    assert prediction.low < max(backward, update) + workspace < prediction.high


def test_the_foreseen_interval_is_narrower_than_the_formulas():
    foreseen, plain = new_model(arm()).above_initialize(candidate(20)), new_model().above_initialize(candidate(20))
    assert (foreseen.high - foreseen.low) / foreseen.value < 0.7 * (plain.high - plain.low) / plain.value


def test_the_formulas_give_the_difference_to_other_fine_knobs():
    model = new_model(arm())
    small, large = (model.above_initialize(candidate(20, bucket=bucket)).value for bucket in (BUCKET, 10 * BUCKET))
    # A bucket of 2-byte gradients, and in the worst case a flat copy of it.
    assert 0.9 * 9 * BUCKET * 2 <= large - small <= 1.4 * 2 * 9 * BUCKET * 2


def test_an_arm_that_was_not_foreseen_follows_the_nearest_one():
    one, three = arm(stage=1), arm(stage=3, backward=SizeLine(1.0 * GIB, 700 * MIB))
    assert nearest_arm([one, three], config(2)) is one
    assert nearest_arm([three, one], config(3)) is three
    offloaded = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert nearest_arm([ForeseenArm(**{**vars(one), "ds_config": offloaded}), three], config(2)) is three
    model = new_model(one, three)
    assert model.allocations(candidate(10, stage=2)).activations == pytest.approx(10 * 600 * MIB)
    assert model.allocations(candidate(10, stage=3)).activations == pytest.approx(10 * 700 * MIB)


def test_the_foreseen_initialisation_takes_from_the_budget():
    small, large = (new_model(arm(initialize=SizeLine(size * GIB))) for size in (2, 10))
    assert small.available(candidate(1)) - large.available(candidate(1)) == pytest.approx(8 * GIB, rel=0.01)


def test_real_trials_refit_figures_that_were_wrong():
    model = new_model(arm())

    def truth(size):
        return 1.0 * GIB + 300 * MIB * size

    for size in (12, 20, 28):
        model.observe(candidate(size), ran(truth(size)))
    assert model.above_initialize(candidate(40)).value == pytest.approx(truth(40), rel=0.06)


def test_a_larger_size_is_never_likelier_to_fit():
    model = new_model(arm())
    sizes = [model.probability_fits(candidate(size), 0.05) for size in range(1, 60, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0.99
    assert sizes[-1] < 0.05


def test_a_processors_peak_leaves_out_memory_that_is_never_written():
    # Stage 1 allocates a bucket of 2-byte gradients, and a model that is half as large fills half of it.
    bucket = 2 * PROFILE.num_params
    allocated = SizeLine(3.0 * bucket)
    foreseen = arm(stage=1, bucket=bucket, backward=allocated, update=allocated)
    asked = candidate(1, stage=1, bucket=bucket)
    on_gpu, on_cpu = (new_model(foreseen, device=device).above_initialize(asked).value for device in ("cuda", "cpu"))
    assert on_gpu == pytest.approx(3.0 * bucket, rel=0.1)
    # A processor may also keep the freed memory of one moment beside that of the other.
    assert 1.9 * bucket < on_cpu < 2.7 * bucket


def test_the_scatter_of_a_processors_peaks_decides_little_of_what_fits():
    model = new_model(arm(), device="cpu")
    for scattered in (0.92, 1.08, 0.9, 1.1, 0.94, 1.06):
        model.observe(candidate(8), ran((2 * GIB + 8 * 600 * MIB) * scattered))
    asked = candidate(26)
    # One peak in twenty would be read above the memory that there is. Fewer trials would run out of it.
    assert model.above_initialize(asked).high > model.available(asked)
    assert model.probability_fits(asked, headroom=0.0) > 0.96
