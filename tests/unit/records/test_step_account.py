"""Where the time of a step goes, in words: figures, what they suggest, and nothing that is not known."""

import pytest

from zerotune.trial_lib.messages.measurement import STEP_PARTS
from zerotune.trial_lib.plan.step_time import PARTS
from zerotune.trial_lib.records.step_account import StepAccount, advice_on
from zerotune.trial_lib.search.catalogue import KNOBS
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE

REDUCED = {"compute": 0.8, "reducing": 0.2}
SHARES = {"compute": 0.5, "gathering": 0.38, "update": 0.1, "reducing": 0.012, "data": 0.008}


def account(**changes):
    fields = {"name": "ZeRO 3, micro-batch 4", "role": "winner", "basis": "traced", "trial": 7, "seconds": 0.113}
    return StepAccount(**{**fields, "shares": SHARES, **changes})


def test_the_sentence_lists_the_parts_largest_first_and_adds_up_to_all():
    assert account().sentence == (
        "With ZeRO 3, micro-batch 4, a step of 113.0 ms is 50 % computation, 38 % waiting for gathered parameters, "
        "10 % the optimizer and 2 % the rest (traced in trial 0007)."
    )


def test_a_trace_that_slowed_the_step_down_says_so():
    assert "(traced in trial 0007, 1.8 times as long under the profiler)" in account(slowed=1.8).sentence
    assert "under the profiler" not in account(slowed=1.2).sentence


def test_what_a_plan_foresaw_is_never_called_measured():
    sentence = account(basis="foreseen", trial=None).sentence
    assert sentence.endswith("(foreseen, not measured).")
    assert "traced" not in sentence


def test_without_a_trace_the_reason_stands_there_and_no_figure():
    said = account(basis="none", shares={}, failure="No trial of it was traced.").sentences
    assert said == (
        "Nothing shows where the time of a step goes with ZeRO 3, micro-batch 4: No trial of it was traced."
    )


def test_a_step_that_only_computes_has_one_part():
    assert "a step of 113.0 ms is 100 % computation (" in account(shares={"compute": 1.0}).sentence


def test_a_document_gives_the_account_back():
    document = account().document()
    assert document["sentence"] == account().sentence
    assert StepAccount.of_document(document) == account()


@pytest.mark.parametrize(
    ("shares", "zero", "measured", "said"),
    [
        (SHARES, {"stage": 3}, (3,), "Waiting for gathered parameters takes 38 % of it: try stage 2 if it fits, or"),
        (SHARES, {"stage": 3}, (2, 3), "try stage 1 if it fits"),
        (SHARES, {"stage": 3}, (0, 1, 2), "try a larger stage3_prefetch_bucket_size"),
        (SHARES, {"stage": 2}, (), "try stage 0 if it fits, or more accumulation."),
        (SHARES, {"stage": 2}, (0,), "takes 38 % of it: try more accumulation."),
        (REDUCED, {"stage": 2}, (), "try more accumulation, overlap_comm, or a larger reduce_bucket_size."),
        (REDUCED, {"stage": 3}, (), "try more accumulation, or a larger reduce_bucket_size."),
        (REDUCED, {"stage": 3, "overlap_comm": False}, (), "overlap_comm, or"),
        (REDUCED, {}, (), "try more accumulation."),
        ({"data": 0.6, "compute": 0.4}, {}, (), "Waiting for the data loader takes 60 % of it: try more workers"),
        ({"host_update": 0.6, "compute": 0.4}, {"stage": 2}, (), "try without offload_optimizer"),
    ],
)
def test_the_largest_wait_suggests_something(shares, zero, measured, said):
    assert said in advice_on(shares, {"zero_optimization": zero}, "cuda", measured)


def test_what_is_on_is_not_suggested_and_small_parts_suggest_nothing():
    on = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert "overlap_comm" not in advice_on(REDUCED, on, "cuda")
    assert advice_on({"compute": 0.87, "gathering": 0.13}, on, "cuda") == ""
    assert advice_on({"compute": 1.0}, {}, "cuda") == ""


def test_a_setting_is_not_suggested_where_deepspeed_does_not_read_it():
    here = Surroundings(device="cpu", slots=2, replicas=2, num_params=10**9, trainable_num_params=10**9)
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage, "overlap_comm": False}}
        for shares in (REDUCED, SHARES):
            advice = advice_on(shares, config, "cpu")
            for name in ("overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
                is_read = any(
                    each.candidates is not None
                    and not each.lacks({STAGE: stage}, here, lambda path: KNOBS[path].default)[1]
                    for each in KNOBS[f"zero_optimization.{name}"].effects
                )
                assert is_read or name not in advice, (stage, name, advice)


def test_every_part_has_words_and_a_suggestion_and_a_plan_has_no_other_parts():
    assert set(PARTS) <= set(STEP_PARTS)
    for part in STEP_PARTS:
        assert len(account(shares={part: 1.0}).sentence) > 40
        assert bool(advice_on({part: 1.0}, {"zero_optimization": {"stage": 3}}, "cuda")) is (part != "compute")
