"""What confirmation says to people."""

from typing import Any

from zerotune.trial_lib.study.confirmation import (
    Confirmed,
    Estimate,
    Finding,
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
    lines = finding(candidates=(WINNER, failed, strange), quantity="processor time per sample").lines
    assert "compared by processor time per sample" in lines[0]
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


def test_the_headline_says_that_processor_time_was_compared() -> None:
    by_time = {"quantity": "processor time per sample"}
    assert finding(**by_time).sentence == (
        "1.83x faster than your configuration in processor time (95 % CI 1.79 to 1.87): ZeRO 2, micro-batch 24"
    )
    none = finding(**by_time, winner=OWN, candidates=(confirmed(verdict="slower"),)).sentence
    assert none == "No configuration was faster than yours in processor time."


def test_another_micro_batch_comes_with_what_depends_on_it() -> None:
    assert micro_batch_advice(4, 4) == ""
    advice = micro_batch_advice(4, 16)
    assert advice.startswith("The micro-batch is 16 and yours 4. Whatever depends on it trains differently")
    assert "BatchNorm" in advice


def test_another_global_batch_comes_with_advice_on_the_learning_rate() -> None:
    assert learning_rate_advice(16, 16) == ""
    advice = learning_rate_advice(16, 64)
    assert "The global batch is 64 and yours 16" in advice
    assert "by 2 (square root" in advice
    assert "or 4 (linear" in advice
    assert finding(advice=advice).lines[-1] == advice
    assert "scale the learning rate, by 0.5 (square root" in learning_rate_advice(64, 16)
