"""What confirmation says to people."""

from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import AcrossRows
from zerotune.trial_lib.study.finding import (
    Confirmed,
    Estimate,
    Finding,
    PlainTraining,
    Worth,
    learning_rate_advice,
    micro_batch_advice,
    partition_advice,
)


def confirmed(name: str = "ZeRO 2, micro-batch 24", **fields: Any) -> Confirmed:
    given = {"trials": (3, 4, 5), "number": 4, "metrics": {"throughput": 150.0}, "verdict": "faster", **fields}
    return Confirmed(name=name, **given)


OWN = confirmed("micro-batch 2", verdict="own")
WINNER = confirmed(gain=Estimate(value=1.83, low=1.79, high=1.87))


def finding(**fields: Any) -> Finding:
    given = {"metric": "throughput", "quantity": "throughput", "rounds": 5, "error": 0.05, "own": OWN}
    return Finding(**{**given, "candidates": (WINNER,), "winner": WINNER, **fields})


def test_the_answer_is_one_sentence_with_its_interval() -> None:
    line = "1.83x faster than your configuration (95 % CI 1.79 to 1.87): ZeRO 2, micro-batch 24"
    assert finding().sentence == line


def test_your_configuration_may_be_the_fastest_by_far_or_within_the_noise() -> None:
    equal, slower = confirmed(verdict="equal"), confirmed(verdict="slower")
    beyond = "No configuration was faster than yours beyond the noise."
    assert finding(winner=OWN, candidates=(slower, equal)).sentence == beyond
    assert finding(winner=OWN, candidates=(slower,)).sentence == "No configuration was faster than yours."


def test_a_winner_that_is_compared_with_nothing_says_what_it_measured() -> None:
    alone = confirmed(verdict="uncompared", value=Estimate(value=150.0, low=145.0, high=155.0))
    said = finding(own=None, winner=alone, candidates=(alone,)).sentence
    compared = "There is no measurement of your configuration to compare it with."
    assert said == f"ZeRO 2, micro-batch 24: 150 samples/s (95 % CI 145 to 155). {compared}"
    once = alone.model_copy(update={"value": None})
    assert finding(own=None, winner=once, candidates=(once,)).sentence == f"ZeRO 2, micro-batch 24. {compared}"


def test_it_says_how_it_was_found_and_what_became_of_the_others() -> None:
    failed = confirmed("ZeRO 1, micro-batch 32", verdict="failed", reason="No room.")
    strange = confirmed("ZeRO 3, micro-batch 24", verdict="disagrees", losses="the loss of step 1 is 3, with yours 2")
    lines = finding(candidates=(WINNER, failed, strange)).lines
    assert "compared by throughput" in lines[0]
    assert lines[1:] == [
        "ZeRO 1, micro-batch 32 did not complete again. No room.",
        "ZeRO 3, micro-batch 24 is not chosen: the loss of step 1 is 3, with yours 2.",
    ]


def test_what_the_measurement_leaves_out_is_said_whoever_wins() -> None:
    note = "The ranks have different numbers of batches: rank 0 had 11 micro-batches; rank 1 had 10 micro-batches."
    equal = confirmed(verdict="equal")
    assert note in finding(left_unmeasured=note).lines
    assert note in finding(winner=OWN, candidates=(equal,), left_unmeasured=note).lines
    assert "" not in finding().lines


def test_nothing_that_completes_again_is_said_with_a_reason() -> None:
    failed = confirmed(verdict="failed", reason="No room.")
    nothing = finding(own=None, winner=None, candidates=(failed,))
    assert (nothing.sentence, nothing.failure) == ("Nothing could be measured a second time.", "No room.")


def test_a_faster_configuration_that_trains_otherwise_is_not_passed_over_in_silence() -> None:
    slower, strange = confirmed(verdict="slower"), confirmed(verdict="disagrees")
    said = finding(winner=OWN, candidates=(slower, strange)).sentence
    assert said == "No configuration that trains as yours does was faster than yours."


def test_a_winner_below_stage_3_says_what_it_needs_of_code_that_partitions_its_model() -> None:
    assert partition_advice(3, partitions_its_model=True) == ""
    assert partition_advice(2, partitions_its_model=False) == ""
    advice = partition_advice(2, partitions_its_model=True)
    assert advice.endswith("give it enabled=False at stage 2.")
    assert advice in finding(in_code=advice).lines


def test_an_open_question_comes_with_the_rounds_that_would_settle_it() -> None:
    equal = confirmed(verdict="equal", gain=Estimate(value=1.06, low=0.97, high=1.16))
    undecided = {"winner": OWN, "candidates": (equal,), "round_seconds": 34.2}
    beyond = "No configuration was faster than yours beyond the noise."
    assert finding(**undecided, more_rounds=12).sentence == (
        f"{beyond} If the best is 1.06x as fast, as it seems, "
        "12 more rounds of about 34 s each would probably settle it."
    )
    assert finding(**undecided, varies=0.084, varies_at_most=0.031).sentence == (
        f"{beyond} Not even the 24 rounds that a confirmation may have would surely settle it. The gain "
        "varies by 8.4 % from round to round. If the best is 1.06x as fast, as it seems, the machine has to be so "
        "quiet that it varies by 3.1 %."
    )


def test_a_faster_configuration_whose_losses_say_nothing_is_not_called_alike() -> None:
    freed = WINNER.model_copy(update={"losses": "the losses were not compared with yours", "is_compared": False})
    found = finding(candidates=(freed,), winner=freed)
    assert found.sentence == f"{finding().sentence}. Its losses were not compared with yours."
    assert "The losses were not compared with yours." in found.lines


def test_another_micro_batch_comes_with_what_depends_on_it() -> None:
    assert micro_batch_advice(4, 4) == ""
    advice = micro_batch_advice(4, 16)
    assert advice.startswith("The micro-batch is 16 and yours 4. Whatever depends on it trains differently")
    assert "BatchNorm" in advice


@pytest.mark.parametrize(
    ("across", "said"),
    [
        (
            AcrossRows(kind="layers", names=["BatchNorm2d"]),
            "yours 4. BatchNorm2d computes over the samples of",
        ),
        (AcrossRows(kind="layers"), "yours 4. A layer computes over the samples"),
        (AcrossRows(kind="loss"), "yours 4. The loss depends on several samples"),
        (AcrossRows(kind="unequal"), "yours 4. The loss is a mean over the tokens, or other parts, of a micro-batch"),
        (AcrossRows(), "On one micro-batch of yours, no layer's output and no loss was found to depend on several"),
        (AcrossRows(undecided="it failed"), "The test of that is not complete: it failed."),
    ],
)
def test_another_micro_batch_comes_with_what_the_profile_has_found(across: AcrossRows, said: str) -> None:
    assert micro_batch_advice(4, 4, across) == ""
    assert said in micro_batch_advice(4, 16, across)


def test_another_global_batch_comes_with_advice_on_the_learning_rate() -> None:
    assert learning_rate_advice(16, 16) == ""
    advice = learning_rate_advice(16, 64)
    assert "The global batch is 64 and yours 16" in advice
    assert "by 2 (square root" in advice
    assert "or 4 (linear" in advice
    assert advice.endswith(
        "counts in steps (warm-up, decay, evaluation, an epoch's end) then takes 4 times the samples. "
        "Compare its losses with yours at equal samples seen: here they were not compared."
    )
    assert finding(advice=advice).lines[-1] == advice
    assert "scale the learning rate, by 0.5 (square root" in learning_rate_advice(64, 16)


def test_the_samples_that_it_holds_for_and_tokens_stand_in_the_notes() -> None:
    own, winner = (
        one.model_copy(update={"metrics": {"throughput": 1.0, "tokens_per_second": tokens}})
        for one, tokens in ((OWN, 1200.0), (WINNER, 2500.0))
    )
    lines = finding(own=own, winner=winner, of_data="Each round trained on other samples of the data.").lines
    assert "Each round trained on other samples of the data." in lines
    assert "Your configuration trains 1,200 tokens/s. The winner trains 2,500 tokens/s." in lines
    assert "Your configuration trains 1,200 tokens/s." in finding(own=own, winner=own).lines


def test_a_change_whose_worth_the_readings_do_not_tell_is_no_gain() -> None:
    worths = (
        Worth(knobs=("stage",), verdict="kept", without=Estimate(value=0.5, low=0.4, high=0.625)),
        Worth(knobs=("overlap_comm",), verdict="kept", without=Estimate(value=1.02, low=0.9, high=1.15)),
    )
    lines = finding(worths=worths).lines
    assert "Of its changes, stage is worth 2.00x (1.60 to 2.50)." in lines
    unclear = "kept, because the readings do not tell whether the gain needs it (0.98x (0.87 to 1.11))"
    assert f"Of its changes, overlap_comm is {unclear}." in lines


def test_a_training_without_deepspeed_is_named_by_its_batch_alone() -> None:
    named = confirmed("ZeRO 0, engine:ddp, --fused true, micro-batch 8, accumulation 2", verdict="uncompared")
    line = PlainTraining(kind="ddp", measured=named, gain=Estimate(value=1.12, low=1.05, high=1.2)).line
    assert "1.12x faster" in line
    assert line.endswith(", with micro-batch 8, accumulation 2.")
