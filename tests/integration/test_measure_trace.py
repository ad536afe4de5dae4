"""Where the time of a step goes, on real ranks: a slow loader, gathered parameters, an offloaded optimizer."""

import dataclasses

import pytest

from zerotune.trial_lib.messages.measurement import TracedStep
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import TrialResult

SHORT = StepWindow(start_step=2, end_step=4, max_steps=3)


def traced(trials, script: str, *arguments: str, **options) -> tuple[TrialResult, TracedStep]:
    plan = dataclasses.replace(trials.plan(script, *arguments, window=SHORT, **options), traces=True)
    result = trials.start(plan).result()
    assert result.outcome == "completed", result.reason
    assert result.traced is not None
    return result, result.traced


def complete(step: TracedStep) -> dict[str, float]:
    assert (step.failure, step.steps > 0) == ("", True)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    return step.shares


def test_a_slow_loader_is_data(trials):
    result, step = traced(trials, "slow_loader.py", micro_batch=4)
    shares = complete(step)
    assert shares["data"] > 0.5
    assert step.parts["data"] > 0.04
    assert len(result.step_times) == 3
    assert 0 < step.spent <= result.phases["trace"]


@pytest.mark.long
def test_a_program_without_a_loader_waits_for_no_data(trials):
    _, step = traced(trials, "transformer.py", micro_batch=4)
    shares = complete(step)
    assert "data" not in shares
    assert shares["compute"] > 0.3


@pytest.mark.long
def test_stage_3_on_two_ranks_gathers(trials):
    wide = ("transformer.py", "--length", "4", "--hidden", "384")
    options = {"micro_batch": 1, "slots": 2}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    _, step = traced(trials, *wide, **options, zero=zero)
    shares = complete(step)
    assert shares["gathering"] > 0.05
    _, step = traced(trials, *wide, **options, zero={"stage": 0})
    assert "gathering" not in complete(step)


@pytest.mark.long
def test_an_offloaded_optimizer_updates_on_the_host(trials):
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    wide = ("transformer.py", "--length", "4", "--hidden", "256")
    _, step = traced(trials, *wide, micro_batch=1, zero=zero)
    shares = complete(step)
    assert shares["host_update"] > 0.1
    assert "update" not in shares
    _, step = traced(trials, *wide, micro_batch=1, zero={"stage": 2})
    shares = complete(step)
    assert shares["update"] > 0.05
    assert "host_update" not in shares


@pytest.mark.long
def test_a_program_that_ends_during_the_trace_keeps_its_measurement(trials):
    result, step = traced(trials, "slow_loader.py", "--batches", "5", micro_batch=2, slots=2)
    assert (result.metrics["measured_steps"], step.steps, step.seconds) == (3, 0, 0)
    assert step.failure == "The program ended before enough steps could be traced."


def test_a_missing_profiler_costs_only_the_trace(trials):
    result, step = traced(trials, "no_profiler.py", micro_batch=2, slots=2)
    assert result.metrics["throughput"] > 0
    assert step.failure == "The steps of another rank could not be traced."
    _, step = traced(trials, "no_profiler.py", micro_batch=2)
    assert step.failure == "The steps could not be traced: RuntimeError: no CUPTI"
