"""The search for the largest and the fastest micro-batch size of one configuration."""

import pytest
from simulated_model import asked, drive, failed, ran, replay, search, told

from zerotune.trial_lib.records.result import Outcome


def model(largest, fastest=10**9, outcome=Outcome.OUT_OF_MEMORY):
    """Runs sizes up to `largest`, with a throughput that rises up to `fastest` and falls beyond."""

    def run(candidate):
        size = candidate.micro_batch_size
        if size > largest:
            return failed(outcome)
        return ran(1000 - abs(size - fastest))

    return run


def sizes(history):
    return [candidate.micro_batch_size for candidate in asked(history)]


def completed(history):
    return [candidate.micro_batch_size for candidate, result in told(history) if result.metrics]


@pytest.mark.parametrize("concurrency", [1, 3, 16])
@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 13, 31, 32])
def test_the_largest_is_exact_up_to_32(largest, concurrency):
    tuner = search("micro_batch", concurrency=concurrency, metric="throughput")
    assert max(completed(drive(tuner, model(largest), concurrency))) == largest
    assert tuner.finished


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("largest", [33, 100, 999, 5000, 100_000])
def test_a_larger_one_is_found_within_a_32nd_of_itself(largest, concurrency):
    tuner = search("micro_batch", concurrency=concurrency, metric="throughput")
    found = max(completed(drive(tuner, model(largest), concurrency)))
    assert largest - largest / 32 - 1 <= found <= largest


@pytest.mark.parametrize("fastest", [1, 3, 5, 11, 20, 60])
def test_the_sizes_around_the_fastest_are_measured(fastest):
    tuner = search("micro_batch", metric="throughput")
    drive(tuner, model(64, fastest))
    assert abs(tuner.best[0].micro_batch_size - fastest) <= max(1, fastest / 8)


def test_no_size_is_asked_for_twice_and_max_trials_holds():
    history = drive(search("micro_batch", concurrency=3, max_trials=12, metric="throughput"), model(10_000, 70), 3)
    assert len(sizes(history)) == len(set(sizes(history))) == 11


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.TIMED_OUT, Outcome.CRASHED])
def test_any_failure_bounds_the_size(outcome):
    history = drive(search("micro_batch", metric="throughput"), model(21, outcome=outcome))
    assert max(completed(history)) == 21
    assert max(sizes(history)) == 32


def test_where_nothing_runs_there_is_no_best():
    tuner = search("micro_batch", metric="throughput")
    assert sizes(drive(tuner, model(0))) == [1]
    assert tuner.best is None


def test_the_users_knobs_and_accumulation_stay():
    tuner = search("micro_batch", metric="throughput", base_config={"gradient_accumulation_steps": 3})
    candidate = tuner.ask()
    assert candidate.knobs == {}
    assert candidate.gradient_accumulation_steps == 3


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_replayed_search_continues_as_the_first_would_have(concurrency):
    def new():
        return search("micro_batch", concurrency=concurrency, metric="throughput")

    whole = drive(new(), model(50, 20), concurrency)
    for position, (call, candidate, _) in enumerate(whole):
        if call == "ask":
            assert replay(new(), whole[:position]).ask() == candidate
    assert replay(new(), whole).finished


def test_no_size_above_the_limit_is_tried_and_the_fastest_below_it_is_looked_for():
    tuner = search("micro_batch", metric="throughput", max_micro_batch=50)
    history = drive(tuner, model(10_000, 44))
    assert max(sizes(history)) == 50
    assert abs(tuner.best[0].micro_batch_size - 44) <= 6
    assert tuner.finished
