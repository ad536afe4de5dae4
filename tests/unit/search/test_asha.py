from dataclasses import replace

import pytest
from pydantic import ValidationError
from simulated_model import GB, PROFILE, SMALL, Model, asked, drive, failed, ran, search, sizes_by_family

WIDE = replace(PROFILE, gpu_mem=10**18)  # ranges of a billion sizes: no binary search ends


def run_family(tuner, value, trials=3):
    """Asks and tells `trials` trials, which must be of one family; returns it."""
    candidates = []
    for _ in range(trials):
        candidates.append(tuner.ask())
        tuner.tell(candidates[-1], ran(value))
    assert len({candidate.family for candidate in candidates}) == 1
    return candidates[0].family


def test_families_search_sizes_as_binary_does():
    asha, binary = (search(method, zero_stages=(0,), max_trials=4) for method in ("asha", "binary"))
    assert drive(asha, Model().run) == drive(binary, Model().run)


def test_a_family_goes_on_until_its_rung_is_complete_and_then_a_new_one_starts():
    tuner = search("asha", profile=WIDE)
    first = run_family(tuner, 1.0)
    assert tuner.ask().family != first


@pytest.mark.parametrize(
    ("settings", "trials"),
    [
        ({}, 3),
        ({"min_binary_search_trials": 2}, 2),
        ({"asha_early_stopping": 1}, 6),
        ({"asha_early_stopping": 2, "divisor": 3}, 27),
    ],
)
def test_the_lowest_rung_takes_so_many_trials(settings, trials):
    tuner = search("asha", profile=WIDE, max_trials=1000, **settings)
    first = run_family(tuner, 1.0, trials)
    assert tuner.ask().family != first


def test_the_best_half_is_promoted_and_rung_1_is_complete_after_twice_the_trials():
    tuner = search("asha", profile=WIDE)
    worse = run_family(tuner, 1.0)
    better = run_family(tuner, 2.0)
    assert run_family(tuner, 2.0) == better  # trials 4 to 6
    assert tuner.ask().family not in (worse, better)


def test_the_best_of_those_not_yet_promoted_is_next():
    tuner = search("asha", profile=WIDE, max_trials=1000)
    families = {}
    for value in (5.0, 4.0):
        families[value] = run_family(tuner, value)
    assert run_family(tuner, 5.0) == families[5.0]
    for value in (3.0, 4.5):
        families[value] = run_family(tuner, value)
    assert tuner.ask().family == families[4.5]  # of four, two: the first of them has been promoted


def test_the_highest_rung_is_promoted_from_first():
    tuner = search("asha", profile=WIDE, max_trials=1000)
    run_family(tuner, 1.0)
    first = run_family(tuner, 9.0)
    assert run_family(tuner, 9.0) == first
    run_family(tuner, 2.0)
    second = run_family(tuner, 8.0)
    assert run_family(tuner, 8.0) == second
    assert run_family(tuner, 9.0, trials=6) == first  # rung 1 has two: its best goes to rung 2


def test_the_rank_in_a_rung_is_the_best_metric_reached_by_then():
    tuner = search("asha", profile=WIDE)
    first = tuner.ask()
    tuner.tell(first, ran(7.0))
    for value in (1.0, 1.0):
        tuner.tell(tuner.ask(), ran(value))
    run_family(tuner, 5.0)
    assert tuner.ask().family == first.family


def test_a_smaller_latency_ranks_higher():
    tuner = search("asha", profile=WIDE, metric="latency")
    better = run_family(tuner, 1.0)
    run_family(tuner, 2.0)
    assert tuner.ask().family == better


def test_from_the_top_rung_none_is_promoted():
    tuner = search("asha", profile=WIDE, max_rungs=1, max_trials=200)
    history = drive(tuner, Model({1: 10**12, 2: 10**12, 3: 10**12}).run)
    assert {len(sizes) for sizes in list(sizes_by_family(history).values())[:-1]} == {3}


def test_no_family_gets_more_trials_than_the_top_rung_takes():
    tuner = search("asha", profile=WIDE, max_rungs=3, max_trials=400, concurrency=4)
    history = drive(tuner, Model({1: 10**12, 2: 10**12, 3: 10**12}).run, 4)
    assert max(len(sizes) for sizes in sizes_by_family(history).values()) == 3 * 2**2


def test_a_failure_at_the_lowest_size_completes_the_rung():
    tuner = search("asha", profile=replace(PROFILE, gpu_mem=1))
    first = tuner.ask()
    tuner.tell(first, failed())
    assert tuner.ask().family != first.family


def test_a_family_without_a_metric_counts_in_its_rung_and_is_never_promoted():
    tuner = search("asha", profile=WIDE)
    for _ in range(3):
        tuner.tell(tuner.ask(), failed())
    worked = run_family(tuner, 1.0)
    assert tuner.ask().family == worked


def test_a_promoted_family_with_no_size_left_leaves_its_place_to_the_next():
    profile = replace(PROFILE, gpu_mem=40 * GB)  # stage 1 does not fit: one size; stage 3 has 29
    tuner = search("asha", profile=profile, zero_stages=(1, 3), max_trials=200)
    history = drive(tuner, lambda candidate: ran(100.0 if candidate.zero_stage == 1 else 1.0))
    trials = {candidate.family: (candidate.zero_stage, 0) for candidate in asked(history)}
    for family, sizes in sizes_by_family(history).items():
        trials[family] = trials[family][0], len(sizes)
    assert {count for stage, count in trials.values() if stage == 1} == {1}
    assert max(count for stage, count in trials.values() if stage == 3) > 3


def test_a_family_with_no_size_left_counts_in_the_rung_it_is_promoted_to():
    profile = replace(WIDE, gpu_mem=40 * GB, activation_mem_per_gpu=1)  # stage 1: one size
    for seed in range(100):
        tuner = search("asha", profile=profile, zero_stages=(1, 3), seed=seed)
        stages = []
        for value in (2.0, 1.0, 3.0):
            candidate = tuner.ask()
            stages.append(candidate.zero_stage)
            tuner.tell(candidate, ran(value))
        if stages == [1, 1, 3]:  # one of the first two has been promoted, and has completed rung 1 as it arrived
            break
    assert stages == [1, 1, 3]
    assert run_family(tuner, 3.0, trials=11) == candidate.family  # the best of two in rung 1: it goes on to rung 2


def test_the_queue_is_served_highest_rung_first_and_then_the_longest_family():
    tuner = search("asha", profile=WIDE, concurrency=3)
    first, second, third = (tuner.ask() for _ in range(3))
    for value, candidate in ((1.0, first), (2.0, second)):
        tuner.tell(candidate, ran(value))
        tuner.tell(tuner.ask(), ran(value))
        last = tuner.ask()
        if candidate is second:
            tuner.tell(third, ran())  # waits before the second is promoted
        tuner.tell(last, ran(value))
    served = [tuner.ask() for _ in range(3)]
    new = served[2].family
    assert [candidate.family for candidate in served] == [second.family, third.family, new]
    tuner.tell(served[2], ran())  # waits with one trial, before the third with two
    tuner.tell(served[1], ran())
    assert [tuner.ask().family for _ in range(2)] == [third.family, new]


def test_when_every_family_is_in_play_the_best_goes_on_whatever_its_share():
    tuner = search("asha", profile=SMALL, zero_stages=(0,), max_trials=1000)  # one family, of which half is none
    history = drive(tuner, Model({0: 24}).run)
    assert 24 in [candidate.micro_batch_size for candidate in asked(history)]


@pytest.mark.parametrize(
    "setting",
    [
        {"max_rungs": 0},
        {"min_binary_search_trials": 0},
        {"asha_early_stopping": -1},
        {"divisor": 1},
        {"search_range_factor": 0},
        {"search_range_factor": float("inf")},
    ],
)
def test_a_setting_of_asha_out_of_its_range_is_refused(setting):
    with pytest.raises(ValidationError):
        search("asha", **setting)


def test_flags_that_come_as_text_are_read_as_integers():
    tuner = search("asha", profile=WIDE, min_binary_search_trials="2", divisor="3", max_rungs="4")
    first = run_family(tuner, 1.0, trials=2)
    assert tuner.ask().family != first
