"""What two failures of one reason rule out, and what they do not."""

import random
from dataclasses import replace
from typing import Any

import adaptive_world
import pytest
import simulated_model

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import SharedReasons
from zerotune.trial_lib.search.knobs import Arm, SearchSpace

TWICE = (
    "The program raised RuntimeError: gradient {} computed twice for this partition. Log: /x/trials/{:04d}/rank0.log"
)
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def knobs(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


SPACE = SearchSpace.of_arms([Arm(knobs(stage, **more)) for stage in range(4) for more in ({}, OFFLOADED)])


def candidate(stage: int, size: int = 8, **more: Any) -> Candidate:
    return Candidate(knobs=knobs(stage, **more), micro_batch_size=size, slots=1)


def ended(number: int, outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> TrialResult:
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=Purpose.SEARCH, config_hash="0", outcome=outcome, **fields
    )


def crashed(number: int, reason: str = TWICE, **fields: Any) -> TrialResult:
    return ended(number, Outcome.CRASHED, reason=reason.format(number, number), **fields)


@pytest.fixture
def known() -> SharedReasons:
    """Stage 1 has run, up to a micro-batch of 64: the user's own."""
    shared = SharedReasons(SPACE, {"zero_optimization": {"stage": 1}})
    shared.tell(Candidate(micro_batch_size=64, slots=1), ended(1), asked=False)
    return shared


def test_a_stage_at_which_two_fail_alike_is_left_out_with_those_between_and_the_sentence_names_both(
    known: SharedReasons,
) -> None:
    known.tell(candidate(2), crashed(3))
    assert known.largest(knobs(2)) is None
    known.tell(candidate(3), crashed(5))
    assert [known.largest(knobs(stage)) for stage in range(4)] == [None, None, 0, 0]
    assert [known.largest(knobs(stage, **OFFLOADED)) for stage in range(4)] == [None, None, 0, 0]
    assert [cause.sentence for cause in known.found] == [
        "Left out after trials 3 and 5, which failed alike: ZeRO stage 2 and above. "
        "The program raised RuntimeError: gradient 3 computed twice for this partition."
    ]


def test_a_knob_that_both_have_and_nothing_that_has_run_is_to_blame_as_long_as_it_may_be(known: SharedReasons) -> None:
    known.tell(candidate(2, **OFFLOADED), crashed(3))
    known.tell(candidate(3, **OFFLOADED), crashed(4))
    assert (known.largest(knobs(2)), known.largest(knobs(2, **OFFLOADED))) == (None, 0)
    assert known.found[0].sentence.startswith(
        "Left out after trials 3 and 4, which failed alike: ZeRO stage 2 and above with offload_optimizer cpu. "
    )
    known.tell(candidate(3), crashed(6))
    assert known.largest(knobs(2)) == 0
    known.tell(candidate(1, **OFFLOADED), crashed(7))
    assert known.largest(knobs(0, **OFFLOADED)) == 0


def test_the_sizes_below_are_left_in_while_the_size_may_be_to_blame(known: SharedReasons) -> None:
    known.tell(candidate(2, 128), crashed(3))
    known.tell(candidate(3, 96), crashed(4))
    assert (known.largest(knobs(3)), known.largest(knobs(1))) == (95, None)
    known.tell(candidate(2, 64), crashed(5))
    assert known.largest(knobs(3)) == 0


def test_what_has_run_is_never_left_out(known: SharedReasons) -> None:
    known.tell(candidate(0), crashed(3))
    known.tell(candidate(2), crashed(4))  # the user's own stage is between
    assert known.found == ()
    known.tell(candidate(3), crashed(5))
    assert known.largest(knobs(2)) == 0
    known.tell(candidate(2, 4), ended(6))  # asked for before
    assert [known.largest(knobs(stage)) for stage in (2, 3)] == [None, None]


@pytest.mark.parametrize(
    "second",
    [
        crashed(5, "The program raised ValueError: no such file. Log: /x"),
        crashed(5, from_outside=True),
        ended(5, Outcome.OUT_OF_MEMORY, reason=TWICE),
        ended(5, Outcome.TIMED_OUT, reason=TWICE),
        ended(5, Outcome.DIVERGED, reason=TWICE),
    ],
    ids=["another reason", "killed", "memory", "deadline", "not finite"],
)
def test_other_ends_share_no_reason(known: SharedReasons, second: TrialResult) -> None:
    known.tell(candidate(2), crashed(3))
    known.tell(candidate(3), second)
    assert known.found == ()


@pytest.mark.parametrize(
    "reason", ["Address already in use", "gloo: Connection closed by peer", "No space left on device"]
)
def test_bad_luck_rules_nothing_out(known: SharedReasons, reason: str) -> None:
    known.tell(candidate(2), crashed(3, reason))
    known.tell(candidate(3), crashed(4, reason))
    assert known.found == ()


def fails_from_stage_2(run: Any) -> Any:
    numbers = iter(range(3, 1000))

    def outcome(asked: Candidate) -> TrialResult:
        number = next(numbers)
        if (asked.zero_stage or 0) >= 2:
            return crashed(number)
        result: TrialResult = run(asked)
        return replace(result, number=number)

    return outcome


def test_adaptive_spends_no_more_than_three_of_its_trials_on_one_reason() -> None:
    tuner = adaptive_world.adaptive(max_trials=12)
    own = Candidate(micro_batch_size=4, slots=2, data_parallel_size=2)
    tuner.observe(own, ended(1, metrics={"throughput": 100.0}))
    history = adaptive_world.drive(tuner, fails_from_stage_2(adaptive_world.SimulatedModel().run))
    failed = [asked for asked, result in adaptive_world.trials(history) if result.outcome is Outcome.CRASHED]
    assert 2 <= len(failed) <= 3
    assert "ZeRO stage 2" in tuner.left_out[0]
    again = adaptive_world.repeat(adaptive_world.adaptive(max_trials=12), [])
    again.observe(own, ended(1, metrics={"throughput": 100.0}))
    assert adaptive_world.repeat(again, history).left_out == tuner.left_out


@pytest.mark.parametrize("method", ["random", "binary", "asha"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_other_methods_draw_no_family_of_a_stage_that_is_left_out(method: str, concurrency: int) -> None:
    tuner = simulated_model.search(method, max_trials=30, seed=2, concurrency=concurrency, base_config=knobs(1))
    tuner.observe(Candidate(micro_batch_size=64, slots=4), ended(1))
    run = fails_from_stage_2(simulated_model.Model().run)
    history = simulated_model.drive(tuner, run, concurrency, random.Random(1))
    failed = [each for each, result in simulated_model.told(history) if result.outcome is Outcome.CRASHED]
    # Those that ran side by side have been asked for before.
    assert 2 <= len(failed) <= 1 + concurrency
    assert [sentence.split(": ")[1] for sentence in tuner.left_out] == [
        "ZeRO stage 2 and above. The program raised RuntimeError"
    ]
    assert {each.zero_stage for each, result in simulated_model.told(history) if result.metrics} == {1}
