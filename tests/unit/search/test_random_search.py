import random
from dataclasses import replace

import pytest
from pydantic import ValidationError
from simulated_model import SMALL, Model, asked, drive, failed, ran, search, sizes_by_family, told

from zerotune.trial_lib.search.dsat import _heads

STAGE_1_GUESS = 39  # (80 - 40 - 0.4 - 0.8 / 4) GB / 1 GB


def range_of_new_families(prepare):
    """The least, mean and largest size of the first trial that follows `prepare(tuner)`, over many seeds."""
    sizes = []
    for seed in range(300):
        tuner = search("random", zero_stages=(1,), trials_per_random_config=1, seed=seed)
        prepare(tuner)
        sizes.append(tuner.ask().micro_batch_size)
    return min(sizes), sum(sizes) / len(sizes), max(sizes)


def run_at(tuner, size, value):
    """A trial of a size of our choice, as a record may hold it."""
    candidate = search("random", zero_stages=(1,), seed=size).ask().model_copy(update={"micro_batch_size": size})
    tuner.apply(candidate)
    tuner.tell(candidate, ran(value))


def test_sizes_are_drawn_as_lo_plus_binomial_of_the_range():
    sizes = [search("random", zero_stages=(0,), seed=seed).ask().micro_batch_size for seed in range(500)]
    mean = sum(sizes) / len(sizes)
    variance = sum((size - mean) ** 2 for size in sizes) / len(sizes)
    assert mean == pytest.approx(1 + 37 / 2, abs=0.6)
    assert variance == pytest.approx(37 / 4, rel=0.25)
    assert 1 <= min(sizes) <= max(sizes) <= 38


@pytest.mark.parametrize("flips", [0, 1, 30, 4096, 4097, 10**12])
def test_a_binomial_draw_is_within_its_range_whatever_its_size(flips):
    draws = [_heads(flips, random.Random(seed)) for seed in range(50)]
    assert all(0 <= draw <= flips for draw in draws)
    assert sum(draws) / 50 == pytest.approx(flips / 2, rel=0.4)


def test_success_raises_the_lower_end_above_the_size():
    tuner = search("random", zero_stages=(0,))
    first = tuner.ask()
    tuner.tell(first, ran())
    assert first.micro_batch_size < tuner.ask().micro_batch_size <= 38


def test_out_of_memory_lowers_the_upper_end_below_the_size():
    tuner = search("random", zero_stages=(0,))
    first = tuner.ask()
    tuner.tell(first, failed())
    assert tuner.ask().micro_batch_size < first.micro_batch_size


def test_the_upper_end_doubles_when_the_lower_end_passes_it():
    one_at_first = replace(SMALL, gpu_mem=1)  # a first guess of 1
    third = set()
    for seed in range(30):
        tuner = search("random", zero_stages=(0,), profile=one_at_first, seed=seed)
        sizes = [candidate.micro_batch_size for candidate in asked(drive(tuner, lambda candidate: ran()))]
        assert sizes[:2] == [1, 2]  # the ranges were [1, 1] and [2, 2]
        third.add(sizes[2])
    assert third == {3, 4}


def test_a_range_that_has_failed_above_does_not_double():
    for seed in range(50):
        history = drive(search("random", zero_stages=(0,), seed=seed), Model({0: 18}).run)
        out_of_memory = [candidate.micro_batch_size for candidate, outcome in told(history) if not outcome.metrics]
        assert out_of_memory == sorted(set(out_of_memory), reverse=True)


def test_a_new_family_starts_above_the_best_trial_of_its_stage_and_below_that_trials_upper_end():
    least, mean, largest = range_of_new_families(lambda tuner: run_at(tuner, 9, 1.0))
    assert least >= 10
    assert mean == pytest.approx((10 + STAGE_1_GUESS) / 2, abs=1)
    assert largest <= STAGE_1_GUESS


def test_a_new_families_range_reaches_at_least_twice_its_lower_end():
    _, mean, _ = range_of_new_families(lambda tuner: run_at(tuner, 99, 1.0))
    assert mean == pytest.approx((100 + 200) / 2, abs=2)


def test_a_new_families_range_reaches_the_largest_size_that_ran_at_its_stage():
    def a_small_best_and_a_large_other(tuner):
        run_at(tuner, 9, 2.0)
        run_at(tuner, 400, 1.0)

    _, mean, _ = range_of_new_families(a_small_best_and_a_large_other)
    assert mean == pytest.approx((10 + 400) / 2, abs=3)


def test_a_stage_without_a_best_trial_starts_from_1_to_the_first_guess():
    def all_fail(tuner):
        for _ in range(3):
            tuner.tell(tuner.ask(), failed())

    least, mean, largest = range_of_new_families(all_fail)
    assert mean == pytest.approx((1 + STAGE_1_GUESS) / 2, abs=1)
    assert 1 <= least <= largest <= STAGE_1_GUESS


def test_a_family_that_failed_at_its_lower_end_stops():
    tuner = search("random", zero_stages=(1,), profile=replace(SMALL, gpu_mem=1, num_params=10**8))
    first = tuner.ask()
    assert first.micro_batch_size == 1
    tuner.tell(first, failed())
    assert tuner.ask().family != first.family


@pytest.mark.parametrize("limit", [1, 3, 5])
def test_a_family_stops_after_trials_per_random_config(limit):
    history = drive(search("random", zero_stages=(1,), trials_per_random_config=limit), lambda candidate: ran())
    lengths = [len(sizes) for sizes in sizes_by_family(history).values()]
    assert max(lengths) == limit


def test_trials_per_random_config_is_5():
    history = drive(search("random", zero_stages=(1,)), lambda candidate: ran())
    assert max(len(sizes) for sizes in sizes_by_family(history).values()) == 5


def test_stage_3_stops_once_stage_1_or_2_has_worked_and_queued_trials_are_checked_again():
    tuner = search("random", concurrency=30)
    candidates = [tuner.ask() for _ in range(30)]
    third = [candidate for candidate in candidates if candidate.zero_stage == 3]
    cheaper = next(candidate for candidate in candidates if candidate.zero_stage in (1, 2))
    assert third
    for candidate in third:  # they wait for their turn
        tuner.tell(candidate, ran())
    tuner.tell(cheaper, ran())
    later = [tuner.ask() for _ in range(len(third) + 1)]
    assert all(candidate.zero_stage == cheaper.zero_stage for candidate in later)


def test_new_families_come_from_the_cheaper_stages_that_have_worked():
    model = Model({0: 50, 1: 0, 2: 30, 3: 45})
    history = drive(search("random", zero_stages=(0, 1, 2, 3)), model.run)
    calls = [(call, candidate) for call, candidate, outcome in history if call == "ask" or outcome.metrics]
    worked = next(
        index for index, (call, candidate) in enumerate(calls) if call == "tell" and candidate.zero_stage == 2
    )
    seen = {candidate.family for _, candidate in calls[:worked]}
    new = [candidate for call, candidate in calls[worked:] if call == "ask" and candidate.family not in seen]
    assert new
    assert {candidate.zero_stage for candidate in new} == {2}


def test_a_stopped_family_is_replaced_by_one_of_a_stage_that_the_user_allows():
    history = drive(search("random", zero_stages=(1, 3)), Model().run)
    assert {candidate.zero_stage for candidate in asked(history)} <= {1, 3}


def test_other_stages_follow_when_a_stages_families_are_used_up():
    tuner = search("random", profile=SMALL, max_trials=1000)  # so small a model has one family at stage 1, 8 at 2
    history = drive(tuner, lambda candidate: ran() if candidate.zero_stage == 1 else failed())
    stage_of = {candidate.family: candidate.zero_stage for candidate in asked(history)}
    assert list(stage_of.values()).count(1) == 1
    assert list(stage_of.values()).count(2) == 8


def test_when_stages_1_and_2_are_used_up_and_one_worked_stage_3_does_not_follow():
    tuner = search("random", profile=SMALL, max_trials=1000)
    history = drive(tuner, lambda candidate: ran() if candidate.zero_stage == 1 else failed())
    calls = [(call, candidate.zero_stage) for call, candidate, _ in history]
    assert ("ask", 3) not in calls[calls.index(("tell", 1)) :]


def test_a_family_that_failed_stops_where_another_of_its_stage_ran_as_large_a_size():
    tuner = search("random", zero_stages=(1,), concurrency=2)
    first, second = tuner.ask(), tuner.ask()
    tuner.tell(first, failed())  # waits
    larger = second.model_copy(update={"micro_batch_size": first.micro_batch_size + 5})
    tuner.apply(larger)
    tuner.tell(larger, ran())
    tuner.tell(second, ran())
    assert tuner.ask().family != first.family


def test_a_family_that_failed_goes_on_while_none_of_its_stage_ran_as_large_a_size():
    tuner = search("random", zero_stages=(1,))
    first = tuner.ask()
    tuner.tell(first, failed())
    assert tuner.ask().family == first.family


def test_early_stopping_ends_the_search_after_so_many_trials_without_a_new_best():
    tuner = search("random", early_stopping=3, concurrency=1)
    for value in (5.0, 4.0, 6.0, 1.0, 2.0):
        tuner.tell(tuner.ask(), ran(value))
        assert not tuner.finished
    tuner.tell(tuner.ask(), failed())
    assert tuner.finished
    assert tuner.ask() is None


def test_early_stopping_counts_from_the_first_best_on():
    tuner = search("random", early_stopping=2)
    for _ in range(10):
        tuner.tell(tuner.ask(), failed())
    assert not tuner.finished


def test_a_search_that_stopped_early_stays_finished_whatever_the_last_trials_say():
    tuner = search("random", early_stopping=1, concurrency=3)
    first, second, third = (tuner.ask() for _ in range(3))
    tuner.tell(first, ran(2.0))
    tuner.tell(second, ran(1.0))
    assert tuner.finished
    tuner.tell(third, ran(3.0))
    assert tuner.finished
    assert tuner.best[0] == third


def test_without_early_stopping_the_search_uses_its_budget():
    assert len(asked(drive(search("random"), lambda candidate: ran()))) == 49


@pytest.mark.parametrize("setting", [{"trials_per_random_config": 0}, {"early_stopping": 0}])
def test_a_setting_of_random_out_of_its_range_is_refused(setting):
    with pytest.raises(ValidationError):
        search("random", **setting)
