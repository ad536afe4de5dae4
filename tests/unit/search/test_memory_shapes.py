"""Which shapes a program's peaks may have, and how often what is said of them holds on recorded trials."""

from dataclasses import replace

import pytest
from test_memory_model import MIB, PROFILE, candidate, new_model, ran

from benchmarks.memory_model.calibration import answers, binomial_interval, figures
from benchmarks.memory_model.calibration import judged as judged_programs
from benchmarks.memory_model.shapes import log_likelihoods, programs, shares, shares_of_all
from zerotune.trial_lib.search.memory_model import SHAPES

SMALL = replace(PROFILE, num_params=10**6, trainable_num_params=10**6, activation_mem_per_gpu=MIB // 20, gpu_mem=0)
AVAILABLE = 1000 * MIB


def small_model():
    """A program of little memory. It has run at a small size, so its limit is known."""
    model = new_model(SMALL, device="cpu")
    model.observe(candidate(64, reduce_bucket_size=10**6), ran(40 * MIB, AVAILABLE))
    return model


def fits(model, size):
    return model.probability_fits(candidate(size, reduce_bucket_size=10**6), headroom=0.0)


def test_some_programs_need_many_times_what_is_computed_so_nothing_far_is_sure_before_it_was_seen():
    # By the formulas this is a quarter of the memory.
    assert 0.7 < fits(small_model(), 4000) < 0.95


def test_a_network_that_is_mostly_frozen_may_need_any_multiple():
    frozen = replace(SMALL, trainable_num_params=10**4)
    known = small_model()
    model = new_model(frozen, device="cpu")
    model.observe(candidate(64, reduce_bucket_size=10**6), ran(40 * MIB, AVAILABLE))
    assert fits(model, 4000) < fits(known, 4000) - 0.02


def of_pairs(size):
    """A loss with ten matrices over all pairs."""
    return (40 + 0.05 * size + 10 * 4 * size**2 / MIB) * MIB


def test_small_sizes_do_not_show_that_no_loss_compares_all_samples():
    model = small_model()
    for size in (128, 256):
        model.observe(candidate(size, reduce_bucket_size=10**6), ran((40 + 0.06 * size) * MIB, AVAILABLE))
    assert fits(model, 512) > 0.97
    assert fits(model, 8192) < 0.95


def test_a_loss_over_all_pairs_shows_by_its_growth():
    model = small_model()
    for size in (512, 1024, 2048):
        model.observe(candidate(size, reduce_bucket_size=10**6), ran(of_pairs(size), AVAILABLE))
    prediction = model.above_initialize(candidate(4000, reduce_bucket_size=10**6))
    assert prediction.value == pytest.approx(of_pairs(4000), rel=0.15)
    assert prediction.low < of_pairs(4000) < prediction.high


def test_small_sizes_whose_peak_is_the_update_do_not_say_that_a_sample_needs_little(monkeypatch):
    def above(size):
        return max(90, 20 + 0.1 * size) * MIB

    def predicted():
        model = small_model()
        for size in (64, 256, 512, 640):
            model.observe(candidate(size, reduce_bucket_size=10**6), ran(above(size), AVAILABLE))
        return model.above_initialize(candidate(2000, reduce_bucket_size=10**6)).value

    found = predicted()
    monkeypatch.setattr("zerotune.trial_lib.search.memory_model._OWN_OF_UPDATE", 1e-6)
    assert above(2000) - found < 0.9 * (above(2000) - predicted())


@pytest.fixture(scope="module")
def recorded():
    return programs(False, ["mixer", "pairing", "translator"])


def judged(recorded, shapes):
    return figures([each for program in recorded for each in answers(program, shapes, seed=3)])


def test_nine_of_ten_recorded_peaks_lie_in_their_intervals_and_what_is_called_sure_fits(recorded):
    found = judged(recorded, None)
    assert found["peaks"] > 200
    assert found["in_the_90_percent_interval"] >= 0.85
    sure = found["over_95_percent"]
    assert sure["cases"] > 100
    assert sure["failures"] <= 0.05 * sure["cases"]


@pytest.mark.long
@pytest.mark.parametrize("is_foreseen", [False, True])
def test_what_is_said_of_a_program_that_is_left_out_holds(is_foreseen):
    found = figures([each for *_, given in judged_programs(is_foreseen, ()) for each in given])
    assert 0.85 <= found["in_the_90_percent_interval"] <= 0.95
    difference, error = found["more_fitted_than_said"]
    assert abs(difference) < 2 * error < 0.2
    sure = found["over_95_percent"]
    assert sure["failures"] < 2 * sure["expected_failures"]


def test_probabilities_that_are_surer_than_the_trials_show(recorded):
    def more_fitted(shift):
        given = [each for program in recorded for each in answers(program, None, seed=3)]
        surer = [replace(each, fits=min(1.0, each.fits + shift)) for each in given if each.fits is not None]
        return figures(surer)["more_fitted_than_said"][0]

    assert more_fitted(0.2) < more_fitted(0.0) - 0.05


@pytest.mark.long
def test_peaks_that_are_taken_for_surer_than_they_are_show(recorded):
    shapes = SHAPES["cpu", False]
    one = (0, 0, 1.0, 0, 0, 0, 0, 0)
    too_sure = replace(shapes, multiples=one, at_once=0, pairs=1e-9, near=0.01, deviations=(0.01,) * 3)
    honest, found = (judged(recorded, each)["in_the_90_percent_interval"] for each in (shapes, too_sure))
    assert found < honest - 0.05


def test_a_share_counts_the_programs_that_show_a_shape_and_half_of_one_more(recorded):
    likelihoods = {program.name: log_likelihoods(program) for program in recorded}
    one, all_of_them = (
        shares(each, SHAPES["cpu", False]) for each in ([likelihoods["pairing"]] * 3, list(likelihoods.values()))
    )
    assert one.pairs == pytest.approx(3.5 / 4, abs=0.001)
    assert all_of_them.pairs == pytest.approx(1.5 / 4, abs=0.001)
    assert min(all_of_them.multiples) > 0


def test_few_cases_say_little():
    assert binomial_interval(0, 10) == (0.0, pytest.approx(0.278, abs=0.001))
    assert binomial_interval(90, 100) == (pytest.approx(0.826, abs=0.001), pytest.approx(0.945, abs=0.001))


@pytest.mark.long
@pytest.mark.parametrize("is_foreseen", [False, True])
def test_the_shares_are_those_of_the_recorded_programs(is_foreseen):
    assert shares_of_all(is_foreseen) == SHAPES["cpu", is_foreseen]
