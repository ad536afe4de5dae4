"""The cases that every method over families goes through alike."""

import random
from dataclasses import replace

import pytest
from case_fixtures import quick_first
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from simulated_model import SMALL, Model, asked, drive, failed, ran, replay, result, search, told

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome
from zerotune.trial_lib.search import methods
from zerotune.trial_lib.search.knobs import SearchSpace

METHODS = sorted(methods.METHODS.keys() - {"adaptive", "micro_batch"})
BOUNDS = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_DATA)
FAILURES = [outcome for outcome in Outcome if outcome not in (Outcome.COMPLETED, *BOUNDS)]

pytestmark = pytest.mark.parametrize("method", METHODS)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("stages", [(0,), (1,), (0, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_it_finds_the_best_of_what_it_ran_and_stays_within_max_trials(method, concurrency, stages):
    tuner = search(method, concurrency=concurrency, zero_stages=stages)
    history = drive(tuner, Model().run, concurrency)
    values = [outcome.metrics["FLOPS_per_gpu"] for _, outcome in told(history) if outcome.metrics]
    assert tuner.best[1].metrics["FLOPS_per_gpu"] == max(values)
    assert len(asked(history)) <= 49
    assert {candidate.zero_stage for candidate in asked(history)} <= set(stages)
    assert tuner.finished
    assert tuner.ask() is None


@pytest.mark.parametrize("concurrency", [1, 4])
def test_max_trials_counts_the_profile_trial_and_failures(method, concurrency):
    assert len(asked(drive(search(method, max_trials=20, concurrency=concurrency), Model().run, concurrency))) == 19
    everything_fails = drive(search(method, max_trials=20, concurrency=concurrency), lambda _: failed(), concurrency)
    assert len(asked(everything_fails)) == 19


def test_with_one_trial_allowed_the_profile_was_it(method):
    tuner = search(method, max_trials=1)
    assert tuner.finished
    assert tuner.ask() is None


def test_it_is_not_finished_while_the_last_trials_run(method):
    tuner = search(method, max_trials=3, concurrency=2)
    first, second = tuner.ask(), tuner.ask()
    assert tuner.ask() is None
    tuner.tell(second, ran())
    assert not tuner.finished
    tuner.tell(first, ran())
    assert tuner.finished


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_search_whose_every_trial_failed_has_no_best(method, concurrency):
    tuner = search(method, concurrency=concurrency)
    drive(tuner, lambda _: failed(), concurrency)
    assert tuner.finished
    assert tuner.best is None


def test_after_the_profile_as_many_random_families_start_as_trials_may_run_at_once(method):
    tuner = search(method, concurrency=4)
    first = [tuner.ask() for _ in range(4)]
    assert len({candidate.family for candidate in first}) == 4
    assert tuner.ask() is None
    assert not tuner.finished


def test_no_candidate_is_proposed_twice(method):
    for seed in range(10):
        history = drive(search(method, seed=seed, max_trials=400, concurrency=4), Model().run, 4, random.Random(seed))
        proposals = [(candidate.family, candidate.micro_batch_size) for candidate in asked(history)]
        assert len(proposals) == len(set(proposals))


def test_when_every_family_was_used_the_search_finishes(method):
    space = SearchSpace.for_model((1, 2), SMALL.num_params)
    tuner = search(method, profile=SMALL, zero_stages=(1, 2), max_trials=10_000, concurrency=4)
    history = drive(tuner, Model(limits={1: 24, 2: 30}).run, 4)
    assert tuner.finished
    assert len(asked(history)) < 9_999
    assert len({candidate.family for candidate in asked(history)}) == space.size(1) + space.size(2) == 9


def test_a_size_for_which_the_data_do_not_last_bounds_every_family(method):
    tuner, most = search(method, max_trials=200), 10**9
    for candidate, ended in told(drive(tuner, Model(data=9).run)):
        assert candidate.micro_batch_size < most
        if ended.outcome is Outcome.OUT_OF_DATA:
            most = candidate.micro_batch_size
    assert tuner.best[0].micro_batch_size <= 9 < most < 10**9


def test_data_that_do_not_last_for_the_smallest_size_end_the_search(method):
    tuner = search(method, max_trials=200)
    history = drive(tuner, Model(data=0).run)
    assert tuner.finished
    assert asked(history)[-1].micro_batch_size == 1


@pytest.mark.parametrize("outcome", quick_first(2, FAILURES))
def test_a_failure_that_is_not_out_of_memory_ends_the_family(method, outcome):
    tuner = search(method, max_trials=1000)
    first = tuner.ask()
    tuner.tell(first, failed(outcome))
    history = drive(tuner, lambda candidate: ran())
    assert first.family not in {candidate.family for candidate in asked(history)}


def test_a_completed_trial_without_the_metric_counts_as_failed(method):
    tuner = search(method)
    tuner.tell(tuner.ask(), result(throughput=5.0))
    assert tuner.best is None


@pytest.mark.parametrize("metric", sorted(SEARCH_METRICS))
def test_the_best_is_in_the_metrics_own_direction(method, metric):
    tuner = search(method, metric=metric, concurrency=3)
    first, second, third = (tuner.ask() for _ in range(3))
    for candidate, value in ((first, 2.0), (second, 1.0), (third, 3.0)):
        tuner.tell(candidate, ran(value))
    assert tuner.best[0] == (second if SEARCH_METRICS[metric].smaller_is_better else third)


def test_of_equal_trials_the_earlier_is_the_best(method):
    tuner = search(method, concurrency=2)
    first, second = tuner.ask(), tuner.ask()
    tuner.tell(first, ran(1.0))
    tuner.tell(second, ran(1.0))
    assert tuner.best[0] == first


def test_flops_per_gpu_over_stages_1_2_3_is_the_default(method):
    settings = methods.METHODS[method].settings()
    assert (settings.metric, settings.zero_stages, settings.max_trials, settings.seed) == (
        "FLOPS_per_gpu",
        (1, 2, 3),
        50,
        42,
    )


@pytest.mark.parametrize(
    "setting",
    [
        {"max_trials": 0},
        {"zero_stages": []},
        {"zero_stages": [4]},
        {"metric": "loss"},
        {"concurrency": 0},
        {"colour": "green"},
    ],
)
def test_a_setting_out_of_its_range_is_refused(method, setting):
    with pytest.raises(ValidationError):
        search(method, **setting)


@pytest.mark.parametrize(("submitted", "steps"), [(None, 1), ("auto", 1), (8, 8)])
def test_the_batch_size_is_derived_from_the_users_accumulation(method, submitted, steps):
    base_config = {} if submitted is None else {"gradient_accumulation_steps": submitted}
    candidate = search(method, base_config=base_config).ask()
    assert candidate.gradient_accumulation_steps == steps
    assert candidate.overrides["train_batch_size"] == candidate.micro_batch_size * steps * 4


def test_another_seed_searches_elsewhere(method):
    def first_families(seed):
        tuner = search(method, seed=seed, concurrency=10)
        return [tuner.ask().family for _ in range(10)]

    assert first_families(1) == first_families(1)
    assert first_families(1) != first_families(2)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), concurrency=st.sampled_from([1, 4, 9]), cut=st.floats(0, 1), small=st.booleans())
def test_a_replayed_history_continues_as_if_nothing_had_happened(method, seed, concurrency, cut, small):
    arguments = {"seed": seed, "concurrency": concurrency, "max_trials": 60}
    if small:
        arguments["profile"] = SMALL
    model = Model({1: 24 + seed % 50, 2: 70, 3: seed % 80})
    original = search(method, **arguments)
    history = drive(original, model.run, concurrency, random.Random(seed))
    cut_at = round(cut * len(history))
    resumed = replay(search(method, **arguments), history[:cut_at])
    for call, candidate, trial_result in history[cut_at:]:
        if call == "ask":
            assert resumed.ask() == candidate
        else:
            resumed.tell(candidate, trial_result)
    assert resumed.finished
    assert resumed.best == original.best


def test_asking_in_vain_changes_nothing(method):
    patient, eager = (search(method, concurrency=2, profile=SMALL) for _ in range(2))
    history = drive(patient, Model().run, 2)
    for call, candidate, trial_result in history:
        if call == "ask":
            assert eager.ask() == candidate
        else:
            assert eager.ask() is None or eager.finished
            eager.tell(candidate, trial_result)
        _ = eager.finished
    assert eager.best == patient.best


def test_a_recorded_ask_is_taken_as_recorded_where_the_search_would_have_asked_otherwise(method):
    tuner = search(method, max_trials=1000)
    proposed = search(method, max_trials=1000).ask()
    other_size = proposed.model_copy(update={"micro_batch_size": proposed.micro_batch_size + 1})
    foreign = Candidate(knobs={"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, micro_batch_size=3)
    for candidate in (other_size, foreign):
        tuner.apply(candidate)
    tuner.tell(foreign, ran(5.0))
    tuner.tell(other_size, ran(1.0))
    assert tuner.best[0] == foreign
    history = drive(tuner, Model().run)
    assert tuner.finished
    proposals = [(candidate.family, candidate.micro_batch_size) for candidate in [*asked(history), other_size, foreign]]
    assert len(proposals) == len(set(proposals))


def test_a_family_of_which_a_recorded_trial_still_runs_is_not_continued(method):
    tuner = search(method, concurrency=3)
    first = tuner.ask()
    larger = first.model_copy(update={"micro_batch_size": first.micro_batch_size + 1})
    tuner.apply(larger)
    tuner.tell(first, ran())
    assert tuner.ask().family != first.family
    tuner.tell(larger, ran())
    assert tuner.ask().family == first.family


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.floats(0, 1))
def test_a_history_recorded_under_other_settings_still_replays(method, seed, cut):
    history = drive(search(method, seed=seed, concurrency=4), Model().run, 4, random.Random(seed))
    history = history[: round(cut * len(history))]
    tuner = replay(search(method, seed=seed + 1, concurrency=4, max_trials=100), history)
    whole = drive(tuner, Model().run, 4, history=history)
    proposals = [(candidate.family, candidate.micro_batch_size) for candidate in asked(whole)]
    assert len(proposals) == len(set(proposals))
    assert tuner.finished


def test_a_result_nobody_waits_for_is_refused(method):
    tuner = search(method)
    candidate = tuner.ask()
    tuner.tell(candidate, ran())
    with pytest.raises(KeyError):
        tuner.tell(candidate, ran())


@pytest.mark.parametrize("concurrency", [1, 4])
def test_no_micro_batch_above_the_limit_is_tried(method, concurrency):
    tuner = search(method, concurrency=concurrency, max_micro_batch=9)
    history = drive(tuner, Model().run, concurrency)
    assert max(candidate.micro_batch_size for candidate in asked(history)) == 9
    assert tuner.finished


def test_a_small_model_s_sizes_grow_with_those_that_ran_and_not_to_what_memory_would_hold_at_once(method):
    tuner = search(method, profile=replace(SMALL, activation_mem_per_gpu=40), max_trials=30)
    largest = 0
    for candidate in asked(drive(tuner, lambda candidate: ran(candidate.micro_batch_size))):
        assert candidate.micro_batch_size <= max(64, 8 * largest)
        largest = max(largest, candidate.micro_batch_size)
    assert largest > 10**4, "no size is left out for good"
