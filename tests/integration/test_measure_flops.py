"""FLOPs against the closed form of a Transformer: counted by hand here, on a real engine there."""

import dataclasses

import pytest

from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose

VOCABULARY, LENGTH, HIDDEN, LAYERS = 384, 64, 128, 3
# Of one sample, forward. An embedding is a look-up, and costs none.
PROJECTIONS = 2 * LENGTH * (4 * HIDDEN**2 + 2 * HIDDEN * 4 * HIDDEN)
ATTENTION = 2 * 2 * LENGTH**2 * HIDDEN
LAYER = PROJECTIONS + ATTENTION
HEAD = 2 * LENGTH * HIDDEN * VOCABULARY
FORWARD = LAYERS * LAYER + HEAD

SHORT = StepWindow(start_step=2, end_step=2, max_steps=1)
ONE_STEP = StepWindow(1, 1, max_steps=1)
COUNTS = {"purpose": Purpose.PROFILE, "window": ONE_STEP}


def flops_per_sample(result, slots=1):
    assert result.outcome == "completed", result.reason
    return result.metrics["FLOPS_per_gpu"] * slots / result.metrics["throughput"]


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_a_transformer_costs_what_its_formula_says(trials, attention):
    result = trials.run("transformer.py", "--attention", attention, **COUNTS)
    assert flops_per_sample(result) == pytest.approx(3 * FORWARD, rel=0.001)


def test_a_sample_counts_for_what_the_study_has_found_whatever_this_trials_batches_are_padded_to(trials):
    plan = dataclasses.replace(trials.plan("transformer.py", window=SHORT), flops_per_sample=FORWARD)
    assert flops_per_sample(trials.start(plan).result()) == pytest.approx(FORWARD)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_two_ranks_and_every_stage_count_the_model_once(trials, stage):
    result = trials.run("transformer.py", slots=2, micro_batch=3, accumulation=2, zero={"stage": stage}, **COUNTS)
    assert flops_per_sample(result, slots=2) == pytest.approx(3 * FORWARD, rel=0.001)


def test_the_backward_pass_ends_where_nothing_below_trains(trials):
    last = trials.run("transformer.py", "--trains", "last", **COUNTS)
    assert flops_per_sample(last) == pytest.approx(FORWARD + 2 * (LAYER + HEAD), rel=0.001)

    head = trials.run("transformer.py", "--trains", "head", **COUNTS)
    assert flops_per_sample(head) == pytest.approx(FORWARD + HEAD, rel=0.001)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("reentrant", "sdpa"),
        ("other", "explicit"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("reentrant", "explicit"), ("other", "sdpa"))),
    ],
)
def test_recomputation_under_activation_checkpointing_is_left_out(trials, kind, attention):
    result = trials.run("transformer.py", "--checkpointing", kind, "--attention", attention, **COUNTS)
    assert flops_per_sample(result) == pytest.approx(3 * FORWARD, rel=0.001)


@pytest.mark.parametrize(
    ("slots", "accumulation", "checkpoint_every"),
    [
        (1, 1, 0),
        (2, 4, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1, 1), (2, 1, 0), (2, 1, 1), (2, 4, 0))),
    ],
)
def test_a_pipeline_counts_all_its_stages_once(trials, slots, accumulation, checkpoint_every):
    result = trials.run(
        "pipeline.py",
        "--checkpoint_every",
        str(checkpoint_every),
        slots=slots,
        micro_batch=3,
        accumulation=accumulation,
        **COUNTS,
    )
    features, width, classes = 24, 32, 8
    forward = 2 * (features * width + 4 * width**2 + width * classes)
    # The data need no gradient, unless checkpointing asks for one.
    first_input = 0 if checkpoint_every else 2 * features * width
    assert flops_per_sample(result, slots) == pytest.approx(3 * forward - first_input, rel=0.001)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2])
def test_experts_count_alike_whether_each_rank_has_all_or_its_own(trials, stage):
    all_of_them, its_own = (
        trials.run("experts.py", "--ep_size", ep_size, slots=2, micro_batch=8, zero={"stage": stage}, **COUNTS)
        for ep_size in ("1", "2")
    )
    assert flops_per_sample(its_own, slots=2) == pytest.approx(flops_per_sample(all_of_them, slots=2), rel=0.001)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1])
def test_a_model_that_autotp_splits_counts_the_work_of_both_halves(trials, stage):
    plans = [trials.plan("tensor_parallel.py", slots=2, zero={"stage": stage}, **COUNTS) for _ in range(2)]
    split = {**plans[1].ds_config, "tensor_parallel": {"autotp_size": 2}}
    plans[1] = dataclasses.replace(plans[1], ds_config=split)
    whole, halves = (flops_per_sample(trials.start(plan).result(), slots=2) for plan in plans)
    assert halves == pytest.approx(whole, rel=0.001)


def test_a_model_whose_flops_nobody_can_count_has_no_such_figure(trials):
    result = trials.run("uncounted.py", **COUNTS)
    assert result.outcome == "completed", result.reason
    assert "FLOPS_per_gpu" not in result.metrics
    assert result.metrics["throughput"] > 0


def test_counts_that_differ_by_more_than_the_ranks_samples_are_no_figure(trials):
    result = trials.run("uncounted.py", "--counted_on", "0", slots=2, **COUNTS)
    assert result.outcome == "completed", result.reason
    assert "FLOPS_per_gpu" not in result.metrics


@pytest.mark.long
def test_ranks_with_batches_of_their_own_sizes_count_for_the_samples_that_each_has(trials):
    plan = trials.plan("batch_shapes.py", "--kind", "budget", slots=2, micro_batch=1, accumulation=2, **COUNTS)
    result = trials.start(dataclasses.replace(plan, arrival=Arrival(varies=True))).result()
    # Of 16 features and 50 words, three times.
    assert flops_per_sample(result, slots=2) == pytest.approx(3 * 2 * 16 * 50)
    # Within a budget of 96 tokens 12 and 8 sentences on rank 0, 8 and 4 on rank 1.
    assert result.metrics["throughput"] == pytest.approx(32 / result.metrics["latency"])
    assert result.metrics["tokens_per_second"] == pytest.approx(4 * 96 / result.metrics["latency"])
