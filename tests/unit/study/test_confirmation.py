"""Who is measured again, for how long, and what is said of it."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.confirm_aa.simulated import MACHINES, Readings, cell
from zerotune.trial_lib.messages.measurement import AcrossRows, Memory, WeightChange
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Neighbour, Outcome, TrialDevice, TrialResult
from zerotune.trial_lib.records.units import gain_line
from zerotune.trial_lib.study.confirmation import (
    Confirmation,
    Contender,
    cut_otherwise,
    cuts_apart,
    ranking,
    rounding_advice,
)
from zerotune.trial_lib.study.finding import Finding

LOSSES = [2.0, 1.9, 1.8]


def result(key: str, number: int = 9, purpose: Purpose = Purpose.CONFIRM, **fields: Any) -> TrialResult:
    given = {"outcome": Outcome.COMPLETED, "losses": LOSSES, "phases": {"steps": 1.0}, **fields}
    return TrialResult(trial_id=f"s-{number}", number=number, purpose=purpose, config_hash=key, **given)


def contender(key: str, speed: float, micro_batch: int = 4, **fields: Any) -> Contender:
    candidate = Candidate(
        knobs={} if key == "own" else {"zero_optimization": {"stage": 2}},
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=16 // micro_batch,
        slots=1,
        data_parallel_size=1,
    )
    reading = result(key, micro_batch, Purpose.SEARCH, metrics={"throughput": speed}, **fields)
    return Contender(candidate, candidate.complete({"zero_optimization": {"stage": 1}}), reading)


OWN = contender("own", 100.0)


def confirm(
    ranked: list[Contender],
    measure: Callable[[str], TrialResult],
    own: Contender | None = OWN,
    search_seconds: float = 60.0,
) -> tuple[Finding, list[str]]:
    """Confirms to the end; returns what was found, and the order in which contenders were measured."""
    confirmation = Confirmation(own, ranked, "throughput", search_seconds)
    keys = [(one.candidate, one.key) for one in (*([own] if own else []), *ranked)]
    order: list[str] = []
    while (candidate := confirmation.next) is not None:
        key = next(key for known, key in keys if known is candidate)
        order.append(key)
        confirmation.tell(replace(measure(key), number=len(order)))
    return confirmation.finding(), order


def speeds(noise: float = 0.01, seed: int = 1, **means: float) -> Callable[[str], TrialResult]:
    draws = random.Random(seed)

    def measure(key: str) -> TrialResult:
        return result(key, metrics={"throughput": means[key] * math.exp(draws.gauss(0, noise))})

    return measure


def test_a_faster_candidate_parts_from_the_user_s_own_and_says_how_sure_that_is() -> None:
    found, _ = confirm([contender("a", 180.0)], speeds(own=100.0, a=180.0))
    assert found.winner is not None
    assert found.winner.gain is not None
    assert found.winner.gain.low < 1.8 < found.winner.gain.high
    gain = found.winner.gain
    assert found.sentence == gain_line(gain.value, "ZeRO 2, micro-batch 4, accumulation 4", (gain.low, gain.high))
    assert found.winner.metrics["throughput"] == pytest.approx(180.0, rel=0.03)


def test_after_one_that_trained_otherwise_with_another_micro_batch_those_of_the_user_s_own_are_measured() -> None:
    def measure(key: str) -> TrialResult:
        apart = {"losses": [3.0, 2.9, 2.8]} if key.startswith("large") else {}
        return replace(speeds(own=100.0, large=200.0, larger=190.5, alike=150.0)(key), **apart)

    ranked = [contender("large", 200.0, 8), contender("larger", 160.0, 16), contender("alike", 150.0)]
    found, order = confirm(ranked, measure)
    assert "larger" not in order
    assert found.winner is not None
    assert found.winner.gain is not None
    assert found.winner.name == "ZeRO 2, micro-batch 4, accumulation 4"
    assert [one.verdict for one in found.candidates] == ["faster", "disagrees"]
    assert "before any update: the loss depends on the micro-batch itself" in found.candidates[1].losses


def test_each_is_measured_in_turn_in_another_order_each_round() -> None:
    _, order = confirm([contender("a", 100.0), contender("b", 99.0)], speeds(own=100.0, a=100.0, b=100.0))
    assert order[:9] == ["own", "a", "b", "a", "b", "own", "b", "own", "a"]


def test_what_parts_early_ends_early_and_what_does_not_goes_on() -> None:
    _, far = confirm([contender("a", 200.0)], speeds(own=100.0, a=200.0))
    _, early = confirm([contender("a", 103.0)], speeds(own=100.0, a=103.0))
    _, late = confirm([contender("a", 103.0)], speeds(noise=0.03, seed=4, own=100.0, a=102.0), search_seconds=200.0)
    assert (len(far), len(early), len(late)) == (6, 8, 48)


def test_rounds_that_would_hardly_tell_are_not_run() -> None:
    found, order = confirm([contender("a", 101.0)], speeds(noise=0.2, seed=2, own=100.0, a=101.0), search_seconds=200.0)
    assert len(order) < 48
    assert found.winner == found.own
    assert found.more_rounds == 0
    assert 0.0 < found.varies_at_most < 0.25 * found.varies
    assert "Not even the 24 rounds that a confirmation may have would surely settle it" in found.sentence


def test_no_more_rounds_are_named_than_a_confirmation_may_have() -> None:
    """Nor any if these were run."""
    for seed, gain in itertools.product(range(12), (100.0, 104.0, 108.0)):
        measured = speeds(noise=0.08, seed=seed, own=100.0, a=gain)
        found, _ = confirm([contender("a", gain)], measured, search_seconds=200.0)
        assert found.rounds + found.more_rounds <= 24
        assert not (found.more_rounds and found.varies)
        is_open = found.winner == found.own and found.candidates[0].verdict == "equal"
        high = found.candidates[0].gain.high if found.candidates[0].gain is not None else 0.0
        assert bool(found.more_rounds or found.varies) == (is_open and high >= 1.02)


def test_where_nothing_parts_the_user_s_own_configuration_is_the_answer() -> None:
    found, _ = confirm([contender("a", 104.0)], speeds(own=100.0, a=100.0))
    assert found.winner == found.own
    assert found.sentence.startswith("No configuration was faster than yours beyond the noise.")
    assert [one.verdict for one in found.candidates] == ["equal"]


def test_only_what_read_nearly_as_well_as_the_best_is_measured_again() -> None:
    ranked = [contender(key, speed) for key, speed in (("a", 200.0), ("b", 191.0), ("c", 189.0))]
    _, order = confirm(ranked, speeds(own=100.0, a=200.0, b=191.0, c=189.0))
    assert set(order) == {"own", "a", "b"}


def test_a_short_search_leaves_time_for_the_best_alone_and_three_rounds_of_it() -> None:
    slow = {"phases": {"steps": 100.0}}
    ranked = [contender(key, 200.0, **slow) for key in ("a", "b", "c")]
    _, order = confirm(ranked, speeds(own=100.0, a=101.0), contender("own", 100.0, **slow), search_seconds=300.0)
    assert order == ["own", "a", "a", "own", "own", "a"]


def test_a_candidate_that_fails_in_a_fresh_process_is_out_and_the_next_best_takes_its_place() -> None:
    measured = speeds(own=100.0, a=200.0, b=150.0)

    def measure(key: str) -> TrialResult:
        if key == "a":
            return result(key, outcome=Outcome.OUT_OF_MEMORY, reason="No room.", metrics={})
        return measured(key)

    found, order = confirm([contender("a", 200.0), contender("b", 150.0, micro_batch=8)], measure)
    assert order.count("a") == 1
    assert [(one.name, one.verdict) for one in found.candidates] == [
        ("ZeRO 2, micro-batch 8, accumulation 2", "faster"),
        ("ZeRO 2, micro-batch 4, accumulation 4", "failed"),
    ]
    assert "ZeRO 2, micro-batch 4, accumulation 4 did not complete again. No room." in found.lines


def filling(share: float) -> dict[str, Any]:
    return {"memory": Memory(peak=[100 + int(1000 * share)], after_initialize=[100], available=[1000])}


def failing(*keys: str, **means: float) -> Callable[[str], TrialResult]:
    """Runs out of memory with some."""
    measured = speeds(**means)

    def measure(key: str) -> TrialResult:
        return result(key, outcome=Outcome.OUT_OF_MEMORY, metrics={}) if key in keys else measured(key)

    return measure


def test_after_one_that_ran_out_of_memory_come_those_that_filled_clearly_less_of_it() -> None:
    shares = {"a": 0.98, "b": 0.95, "c": 0.86, "d": 0.8, "e": 0.5}
    ranked = [contender(key, 200.0 - place, **filling(share)) for place, (key, share) in enumerate(shares.items())]

    # Time for one at once: each heat has one.
    found, order = confirm(ranked, failing("a", "b", "c", own=100.0, d=197.0, e=196.0), search_seconds=12.0)
    assert order[:4] == ["own", "a", "own", "d"]
    assert found.winner is not None
    assert found.winner.verdict == "faster"

    # Where nothing fills less, what is left is tried all the same.
    _, order = confirm(ranked[:2], failing("a", "b", own=100.0), search_seconds=12.0)
    assert [key for key in order if key != "own"] == ["a", "b"]


@pytest.mark.parametrize("own", [OWN, None], ids=["beside the user's own", "alone"])
def test_those_that_were_passed_over_after_one_ran_out_of_memory_keep_their_turn(own: Contender | None) -> None:
    shares = {"a": 0.98, "b": 0.95, "c": 0.93, "d": 0.5}
    means = {"a": 200.0, "b": 180.0, "c": 152.0, "d": 150.0}
    ranked = [contender(key, means[key], **filling(share)) for key, share in shares.items()]
    found, order = confirm(ranked, failing("a", "c", "d", own=100.0, b=180.0), own)
    assert [key for key in dict.fromkeys(order) if key != "own"] == ["a", "d", "b"]
    assert [one.verdict for one in found.candidates][1:] == ["failed", "failed"]
    assert found.winner is not None
    assert found.winner.metrics["throughput"] == pytest.approx(180.0, rel=0.03)


def test_a_candidate_that_trains_otherwise_is_reported_with_both_losses_and_not_chosen() -> None:
    measured = speeds(own=100.0, a=200.0)

    def measure(key: str) -> TrialResult:
        return replace(measured(key), losses=[2.0, 2.4, 3.0] if key == "a" else LOSSES)

    found, _ = confirm([contender("a", 200.0)], measure)
    assert found.winner is not None
    assert found.winner.verdict == "own"
    said = "the loss of step 2 is 2.4, with your configuration 1.9"
    assert f"ZeRO 2, micro-batch 4, accumulation 4 is not chosen: {said}." in found.lines


def test_without_the_user_s_own_the_best_is_measured_absolutely() -> None:
    found, order = confirm([contender("a", 200.0)], speeds(a=200.0), own=None)
    assert order == ["a"] * 4
    assert found.winner is not None
    assert found.winner.gain is None
    assert found.winner.value is not None
    assert found.winner.value.low < 200.0 < found.winner.value.high
    assert found.sentence.endswith("There is no measurement of your configuration to compare it with.")


def test_the_learning_rate_follows_a_batch_that_the_user_s_own_did_not_complete_with() -> None:
    best = contender("a", 200.0)
    own = OWN.candidate.model_copy(
        update={"gradient_accumulation_steps": 2 * OWN.candidate.gradient_accumulation_steps}
    )
    confirmation = Confirmation(None, [best], "throughput", 60.0, own)
    measured = speeds(a=200.0)
    while confirmation.next is not None:
        confirmation.tell(measured("a"))
    assert confirmation.finding().advice.startswith("The global batch is 16 and yours 32")


def test_a_failure_of_the_user_s_own_changes_no_answer() -> None:
    measured, failed = speeds(own=100.0, a=80.0), [result("own", outcome=Outcome.CRASHED, reason="Bad luck.")]

    def measure(key: str) -> TrialResult:
        return failed.pop() if key == "own" and failed else measured(key)

    found, _ = confirm([contender("a", 80.0)], measure)
    assert found.winner is not None
    assert found.winner.verdict == "own"


def test_where_the_user_s_own_runs_out_of_memory_it_is_not_measured_again() -> None:
    measured = speeds(own=100.0, a=200.0)

    def measure(key: str) -> TrialResult:
        return result(key, outcome=Outcome.OUT_OF_MEMORY) if key == "own" else measured(key)

    found, order = confirm([contender("a", 200.0)], measure)
    assert order.count("own") == 1
    assert found.winner is not None
    assert found.winner.verdict == "uncompared"


def test_where_the_user_s_own_fails_each_time_the_best_is_left_uncompared() -> None:
    measured = speeds(own=100.0, a=200.0)

    def measure(key: str) -> TrialResult:
        return result(key, outcome=Outcome.CRASHED, reason="Bad luck.") if key == "own" else measured(key)

    found, order = confirm([contender("a", 200.0)], measure)
    assert order.count("own") == 2
    assert found.winner is not None
    assert found.winner.verdict == "uncompared"


@pytest.mark.parametrize("victim", ["own", "a"])
def test_a_trial_that_is_killed_from_outside_is_measured_once_more_and_changes_no_answer(victim: str) -> None:
    measured = speeds(own=100.0, a=200.0)
    killed = [result(victim, outcome=Outcome.CRASHED, reason="The host died.", from_outside=True)]

    def measure(key: str) -> TrialResult:
        return killed.pop() if key == victim and killed else measured(key)

    found, order = confirm([contender("a", 200.0)], measure)
    undisturbed, order_then = confirm([contender("a", 200.0)], speeds(own=100.0, a=200.0))
    assert len(order) == len(order_then) + 1
    assert found.winner is not None
    assert undisturbed.winner is not None
    assert (found.winner.name, found.winner.verdict) == (undisturbed.winner.name, "faster")
    assert found.winner.gain == undisturbed.winner.gain


BESIDE = [TrialDevice(device="GPU-a", model="H100", company=[Neighbour(pid=7, name="notebook")])]


def test_a_trial_that_had_company_is_measured_again_and_counts_no_more() -> None:
    plain, disturbed = speeds(own=100.0, a=150.0), [True]

    def measure(key: str) -> TrialResult:
        if key == "own" and disturbed:
            disturbed.clear()
            return result("own", metrics={"throughput": 10.0}, devices=BESIDE)
        return plain(key)

    found, order = confirm([contender("a", 150.0)], measure)
    assert order[:3] == ["own", "own", "a"]
    assert found.own is not None
    assert found.own.trials[0] == 2
    assert found.own.metrics["throughput"] == pytest.approx(100.0, rel=0.05)
    assert found.on_devices == ()


def test_company_that_stays_does_not_keep_a_confirmation_from_its_end_and_is_said() -> None:
    def beside(key: str) -> TrialResult:
        return result(key, metrics={"throughput": {"own": 100.0, "a": 150.0}[key]}, devices=BESIDE)

    found, order = confirm([contender("a", 150.0)], beside)
    counted = found.rounds * 2
    assert len(order) == counted + 2
    (said,) = found.on_devices
    assert said.startswith(f"In {counted} of {counted} of these trials other processes computed")
    assert "(notebook)" in said
    assert said in found.lines


A, B = TrialDevice(device="GPU-a", model="H100"), TrialDevice(device="GPU-b", model="H100")


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ((A, B), "2 different sets"),
        ((A, A.model_copy(update={"held_down": ["its temperature"]})), "held down by its temperature"),
        ((A, A.model_copy(update={"held_down": ["its power limit"]})), None),
        ((A, A), None),
        ((TrialDevice(device="3"), TrialDevice(device="4")), None),
    ],
)
def test_what_of_the_devices_may_part_trials_is_said(devices: tuple[TrialDevice, ...], said: str | None) -> None:
    of = dict(zip(("own", "a"), devices, strict=True))
    found, _ = confirm(
        [contender("a", 150.0)],
        lambda key: result(key, metrics={"throughput": {"own": 100.0, "a": 150.0}[key]}, devices=[of[key]]),
    )
    assert len(found.on_devices) == (said is not None)
    assert said is None or said in found.on_devices[0]


def test_a_candidate_that_is_killed_every_time_is_out() -> None:
    measured = speeds(own=100.0, a=200.0)

    def measure(key: str) -> TrialResult:
        return result(key, outcome=Outcome.CRASHED, from_outside=True) if key == "a" else measured(key)

    found, order = confirm([contender("a", 200.0)], measure)
    assert order.count("a") == 2
    # Then nothing is left that yours was compared with.
    assert found.winner is None
    assert found.sentence.endswith("(1) none could be measured a second time.")


def test_a_resumed_confirmation_continues_where_it_was() -> None:
    ranked = [contender("a", 102.0)]
    one = Confirmation(OWN, ranked, "throughput", 60.0)
    other = Confirmation(OWN, ranked, "throughput", 60.0)
    measure = speeds(own=100.0, a=101.0)
    told = []
    for number in range(7):
        assert one.next is not None
        told.append(replace(measure("own" if one.next is OWN.candidate else "a"), number=number))
        one.tell(told[-1])
    for again in told:
        other.tell(again)
    assert other.next is one.next
    assert other.finding() == one.finding()


def test_an_unsteady_clock_leaves_the_user_s_own_and_says_how_many_more_rounds_would_tell() -> None:
    slow = {"phases": {"steps": 20.0}}
    own, one = contender("own", 100.0, **slow), contender("a", 110.0, **slow)
    measured = speeds(noise=0.1, seed=4, own=100.0, a=112.0)
    found, _ = confirm([one], lambda key: replace(measured(key), **slow), own, search_seconds=640.0)
    assert found.rounds == 8
    assert found.winner == found.own
    assert 4 <= found.more_rounds <= 16
    assert found.sentence.endswith(f"{found.more_rounds} more rounds of about 40 s each would probably settle it.")


def test_what_surely_brings_too_little_ends_early_and_needs_no_more_rounds() -> None:
    found, order = confirm([contender("a", 100.5)], speeds(noise=0.001, own=100.0, a=100.0))
    assert len(order) == 6
    assert found.more_rounds == 0
    assert found.sentence == "No configuration was faster than yours beyond the noise."


def test_the_ranking_has_each_configuration_once_and_the_user_s_own_nowhere() -> None:
    readings = [
        contender("a", 110.0),
        contender("a", 120.0),
        contender("own", 130.0),
        contender("b", 150.0, outcome=Outcome.OUT_OF_MEMORY),
        contender("c", 140.0),
    ]
    assert [(one.key, one.reading.metrics["throughput"]) for one in ranking(readings, OWN, "throughput")] == [
        ("c", 140.0),
        ("a", 120.0),
    ]


def test_the_ranking_goes_by_what_the_search_expects_and_what_has_failed_another_time_comes_last() -> None:
    lucky = replace(contender("lucky", 150.0), expected=120.0)
    steady = replace(contender("steady", 130.0), expected=128.0)
    forgetful = replace(contender("forgetful", 140.0), expected=140.0)
    flaky = contender("flaky", 135.0)
    again = [
        contender("forgetful", 0.0, outcome=Outcome.OUT_OF_MEMORY),
        contender("flaky", 0.0, outcome=Outcome.CRASHED),
    ]
    again += [contender("steady", 0.0, outcome=Outcome.TOO_SLOW), contender("read", 0.0, outcome=Outcome.CANCELLED)]
    ranked = ranking([lucky, steady, forgetful, flaky, *again, contender("read", 125.0)], OWN, "throughput")
    assert [one.key for one in ranked] == ["steady", "read", "lucky", "forgetful", "flaky"]


@pytest.mark.parametrize("twins", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("machine", ["a GPU", "a shared host", "samples of unequal length"])
def test_identical_configurations_are_called_equal_in_95_of_100_confirmations(machine: str, twins: int) -> None:
    gains = dict.fromkeys(("own", "a", "b", "c")[: twins + 1], 1.0)
    found = cell(Readings(MACHINES[machine], seed=1).of, gains, times=1000 if twins == 1 else 200)
    assert found["called faster"] + found["called slower"] <= 0.05


@pytest.mark.parametrize(
    ("machine", "gain", "often"), [("a GPU", 1.02, 0.95), ("a quiet host", 1.05, 0.95), ("a shared host", 1.2, 0.75)]
)
def test_a_true_gain_is_found_by_the_clock_and_its_interval_contains_it(
    machine: str, gain: float, often: float
) -> None:
    found = cell(Readings(MACHINES[machine], seed=1).of, {"own": 1.0, "a": gain}, times=200)
    assert found["called faster"] >= often
    assert found["an interval misses the truth"] <= 0.05


@pytest.mark.parametrize(("size", "verdict"), [(1.02, "faster"), (0.5, "disagrees")])
def test_where_weights_are_compared_the_user_s_own_runs_once_more_in_other_rounding(size: float, verdict: str) -> None:
    def changed(size: float) -> WeightChange:
        return WeightChange(updates=3, modules=["head"], sums=[[size, -size] * 4])

    confirmation = Confirmation(OWN, [contender("a", 180.0)], "throughput", 60.0)
    order: list[tuple[str, float | None]] = []
    measure = speeds(own=100.0, a=180.0)
    while (candidate := confirmation.next) is not None:
        key, rounding = "own" if candidate is OWN.candidate else "a", confirmation.rounding
        order.append((key, rounding))
        change = changed(size if key == "a" else 1.0 if rounding is None else 1.03)
        confirmation.tell(replace(measure(key), number=len(order), rounding=rounding, weight_change=change))
    assert [place for place, (_, rounding) in enumerate(order) if rounding is not None] == [4]
    assert order[4] == ("own", 2.0**-24)
    found = confirmation.finding()
    assert [one.verdict for one in found.candidates] == [verdict]
    assert found.own is not None
    assert 5 not in found.own.trials
    if verdict == "faster":
        assert "a difference of 7 % in that change would have been seen" in found.candidates[0].losses
    else:
        assert found.candidates[0].losses.endswith(
            "but the changes of the weights are 50 % apart (7 % is within rounding)"
        )


@pytest.mark.parametrize(
    ("across", "micro_batch"),
    [
        (None, 8),
        (AcrossRows(undecided="the loss is computed outside the engine"), 8),
        (AcrossRows(kind="unequal"), 8),
        (AcrossRows(is_outside=True), 8),
        (AcrossRows(), 4),
    ],
    ids=["untested", "undecided", "a mean over tokens", "outside the engine", "row by row"],
)
def test_the_trial_in_other_rounding_has_the_candidate_s_micro_batch_unless_that_is_known_to_make_no_difference(
    across: AcrossRows | None, micro_batch: int
) -> None:
    confirmation = Confirmation(OWN, [contender("a", 180.0, 8)], "throughput", 60.0, across=across)
    change, measure, rounded = WeightChange(updates=3, modules=["head"], sums=[[1.0] * 8]), speeds(own=1.0, a=2.0), []
    while (candidate := confirmation.next) is not None:
        if confirmation.rounding is not None:
            rounded.append((candidate.micro_batch_size, candidate.settings["train_micro_batch_size_per_gpu"]))
        key = "own" if candidate is OWN.candidate or confirmation.rounding is not None else "a"
        confirmation.tell(replace(measure(key), rounding=confirmation.rounding, weight_change=change))
    assert rounded == [(micro_batch, micro_batch)]


def test_the_trial_in_other_rounding_has_the_micro_batch_that_is_furthest_from_yours() -> None:
    """A mean over tokens changes most with it, so candidates in between are within its reach."""
    candidates = [contender("a", 180.0, size).candidate for size in (8, 1, 2)]
    assert cut_otherwise(OWN.candidate, candidates).micro_batch_size == 1
    assert cut_otherwise(OWN.candidate, candidates[:1]).micro_batch_size == 8
    reach = cuts_apart(OWN.candidate, candidates[2])
    assert cuts_apart(OWN.candidate, candidates[0]) < reach < cuts_apart(OWN.candidate, candidates[1])


@pytest.mark.parametrize(
    ("most", "tried", "is_compared"), [(7, [8, 2], True), (1, [8, 2, 4], False)], ids=["half fits", "nothing else runs"]
)
def test_where_your_other_settings_have_no_room_for_that_micro_batch_it_is_half_of_yours(
    most: int, tried: list[int], is_compared: bool
) -> None:
    """Your own cut alone would not show by how much a mean over tokens changes with another."""
    candidates = [contender("a", 180.0, 8), contender("b", 175.0, 8)]
    confirmation = Confirmation(OWN, candidates, "throughput", 600.0)
    measure = speeds(own=1.0, a=2.0, b=1.5)
    changes = {4: 1.0, 8: 1.2, 2: 1.3}
    rounded = []
    while (candidate := confirmation.next) is not None:
        rounding, size = confirmation.rounding, candidate.micro_batch_size
        key = "own" if candidate is OWN.candidate or rounding is not None else "a"
        key = "b" if candidate is candidates[1].candidate else key
        change = WeightChange(updates=3, modules=["head"], sums=[[changes[size]] * 8])
        ended = replace(measure(key), rounding=rounding, weight_change=change)
        if rounding is not None:
            rounded.append(size)
            ended = replace(ended, config_hash=f"own of {size}") if size != 4 else ended
        if rounding is not None and size > most and size != 4:
            ended = replace(ended, outcome=Outcome.OUT_OF_MEMORY, metrics={})
        confirmation.tell(ended)
    assert rounded == tried
    found = confirmation.finding().candidates
    assert [one.verdict for one in found] == ["faster", "faster"]
    assert ("the change of the weights was not compared" in found[0].losses) is not is_compared


def test_without_time_for_the_trial_in_other_rounding_two_rounds_are_an_answer() -> None:
    confirmation = Confirmation(OWN, [contender("a", 180.0)], "throughput", 60.0)
    change, measure = (
        WeightChange(updates=3, modules=["head"], sums=[[1.0] * 8]),
        speeds(own=100.0, a=180.0, noise=1e-3),
    )
    while confirmation.rounding is None:
        key = "own" if confirmation.next is OWN.candidate else "a"
        confirmation.tell(replace(measure(key), weight_change=change))
    confirmation.end_now()
    found = confirmation.finding()
    assert found.rounds == 2
    assert found.winner is not None
    assert found.winner.verdict == "faster"
    assert "was not measured in other rounding" in found.winner.losses


def test_a_free_batch_needs_no_trial_in_other_rounding() -> None:
    other = contender("a", 180.0)
    larger = replace(other, candidate=other.candidate.model_copy(update={"micro_batch_size": 8}))
    confirmation = Confirmation(OWN, [larger], "throughput", 60.0)
    change, measure = WeightChange(updates=3, modules=["head"], sums=[[1.0] * 8]), speeds(own=100.0, a=180.0)
    while (candidate := confirmation.next) is not None:
        assert confirmation.rounding is None
        confirmation.tell(replace(measure("own" if candidate is OWN.candidate else "a"), weight_change=change))
    assert "train_batch_size (16 -> 32) changes them" in confirmation.finding().candidates[0].losses


@pytest.mark.parametrize(
    ("settings", "micro_batch", "is_said"),
    [
        ({"bf16": {"enabled": True}}, 8, True),
        ({"bf16": {"enabled": True}}, 4, False),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 8, False),
        ({"bf16": {"enabled": False}}, 8, False),
        ({}, 8, False),
    ],
)
def test_sums_in_bf16_over_another_number_of_micro_batches_are_named_with_the_remedy(
    settings: dict[str, Any], micro_batch: int, is_said: bool
) -> None:
    own, other = (replace(contender("a", 1.0, size), config=settings) for size in (4, micro_batch))
    said = rounding_advice(own, other)
    assert ("data_types.grad_accum_dtype: fp32" in said) is is_said
    assert not is_said or "add up in bf16 over 2 micro-batches and yours over 4" in said
