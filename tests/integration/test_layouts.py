"""Layouts by switches of programs on two CPU ranks: pipelines, Ulysses and experts keep the global batch."""

import dataclasses
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, Replicas
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.switches import PROGRAM

GLOBAL_BATCH = 8
FEW, ONE = StepWindow(start_step=2, end_step=4, max_steps=3), StepWindow(1, 1, max_steps=1)
STAGES = ("layouts/stages.py", "--pipeline_stages", "pipeline")
SEQUENCES = ("layouts/sequences.py", "--sequence-ranks", "sequence")
EXPERTS = ("experts.py", "--ep_size", "expert")

pytestmark = [pytest.mark.alone, pytest.mark.long]


def plan(
    trials: Any,
    program: tuple[str, str, str],
    size: int,
    *arguments: str,
    meant: int | None = None,
    accumulation: int = 1,
    **options: Any,
) -> TrialPlan:
    """Returns the trial of a layout at the global batch of all. The study may mean another size than is typed."""
    script, option, kind = program
    base = {PROGRAM: {option: 1}, LAYOUTS: {option: kind}}
    knobs = {"zero_optimization": {"stage": 1}, PROGRAM: {option: size if meant is None else meant}}
    replicas = Replicas(slots=2, own=2, base_config=base).of(knobs)
    micro_batch = GLOBAL_BATCH // replicas // accumulation
    words = [option, str(size), *(word.format(micro_batch=micro_batch) for word in arguments)]
    options = {"window": FEW, "zero": {"stage": 1}, **options}
    made = trials.plan(script, *words, slots=2, micro_batch=micro_batch, **options)
    candidate = Candidate(
        knobs=knobs,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        slots=2,
        data_parallel_size=replicas,
    )
    config = {key: value for key, value in candidate.complete({**made.ds_config, **base}).items() if key not in base}
    return dataclasses.replace(made, candidate=candidate, ds_config=config, replicas=replicas)


def ran(trials: Any, made: TrialPlan) -> TrialResult:
    result = trials.start(made).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param(STAGES, (), id="stages"),
        pytest.param(SEQUENCES, ("--micro-batch", "{micro_batch}"), id="sequences"),
        pytest.param(EXPERTS, (), id="experts"),
        pytest.param(EXPERTS, ("--experts", "4"), id="four experts"),
    ],
)
def test_both_layouts_train_alike_and_count_each_sample_once(
    trials: Any, program: tuple[str, str, str], arguments: tuple[str, ...]
) -> None:
    # DeepSpeed's loader for Ulysses gives the ranks' batches one after the other, so two make up one of two replicas.
    steps = 2 if program is SEQUENCES else 1
    one = ran(trials, plan(trials, program, 1, *arguments))
    two = ran(trials, plan(trials, program, 2, *arguments, accumulation=steps))
    assert len(two.losses) >= 4
    assert two.losses == pytest.approx(one.losses, rel=0.0 if program is EXPERTS else 1e-4)
    assert two.initial_weights == pytest.approx(one.initial_weights, rel=1e-6)
    for result in (one, two):
        assert result.metrics["throughput"] * result.metrics["latency"] == pytest.approx(GLOBAL_BATCH)


def test_a_pipeline_keeps_the_batch_with_accumulation(trials: Any) -> None:
    one, two = (ran(trials, plan(trials, STAGES, size, accumulation=2)) for size in (1, 2))
    assert two.losses == pytest.approx(one.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("program", "arguments", "replicas"),
    [
        pytest.param(STAGES, (), 1, id="stages"),
        pytest.param(SEQUENCES, ("--micro-batch", "{micro_batch}"), 1, id="sequences"),
        pytest.param(EXPERTS, (), 2, id="experts"),
    ],
)
def test_the_profile_of_a_layout_is_that_of_the_whole_model(
    trials: Any, program: tuple[str, str, str], arguments: tuple[str, ...], replicas: int
) -> None:
    once = {"purpose": Purpose.PROFILE, "window": ONE}
    whole, divided = (ran(trials, plan(trials, program, size, *arguments, **once)).profile for size in (1, 2))
    assert whole is not None
    assert divided is not None
    assert (whole.data_parallel_size, divided.data_parallel_size) == (2, replicas)
    assert (divided.num_params, divided.trainable_num_params) == (whole.num_params, whole.trainable_num_params)
    assert (divided.expert_params, divided.shape) == (whole.expert_params, whole.shape)
    assert (whole.expert_ranks, divided.expert_ranks) == (1, 2 if program is EXPERTS else 1)
    if program is not EXPERTS:
        assert divided.activation_mem_per_gpu < whole.activation_mem_per_gpu


def test_a_layout_of_another_kind_than_the_user_says_is_not_measured(trials: Any) -> None:
    """The program has one stage, and the user says that the option makes two."""
    result = trials.start(plan(trials, STAGES, 1, meant=2)).result()
    assert result.outcome is Outcome.INVALID
    assert "makes 1 replica of the model of 2 ranks, but the engine has 2 replicas" in result.reason
    assert not result.metrics


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        pytest.param(SEQUENCES, ("--micro-batch", "8", "--heads", "3"), "Attention head count 3 is not", id="heads"),
        pytest.param(SEQUENCES, ("--micro-batch", "8", "--length", "15"), "isn't divisible by sp-size", id="tokens"),
        pytest.param(STAGES, ("--layers", "1"), "optimizer got an empty parameter list", id="layers"),
        pytest.param(EXPERTS, ("--experts", "3"), "should be divisible by expert parallel size", id="experts"),
    ],
)
def test_deepspeed_refuses_what_the_rules_refuse(
    trials: Any, program: tuple[str, str, str], arguments: tuple[str, ...], says: str
) -> None:
    """The witnesses of `unshared_heads`, `unshared_tokens`, `empty_stages` and `undivided_experts`."""
    result = trials.start(plan(trials, program, 2, *arguments)).result()
    assert result.outcome in (Outcome.CRASHED, Outcome.INVALID), result.reason
    assert says in result.reason
