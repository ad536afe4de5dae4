"""Trainings in 16 bits, by DeepSpeed's configuration and by the code's own doing, on whatever device this host has."""

import dataclasses
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.study.loss_agreement import LossCourse, compare

SHORT = StepWindow(start_step=3, end_step=8, max_steps=6)


def completed(result: TrialResult) -> TrialResult:
    assert result.outcome == "completed", result.reason
    return result


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_a_scaled_loss_is_noted_as_it_was_before(trials: Any, stage: int) -> None:
    """Scaled, the first losses are infinite in fp16: the steps are skipped, and the training is a good one."""
    by_engine, by_loss = (
        completed(trials.run("fp16.py", "--by", by, zero={"stage": stage}, window=SHORT)) for by in ("engine", "scale")
    )
    assert by_loss.losses == pytest.approx(by_engine.losses, rel=1e-2)
    assert by_loss.skipped_steps == by_engine.skipped_steps != []
    assert 0.0 < by_loss.metrics["loss_first"] < 10.0


def test_where_loss_scaling_skips_other_steps_trainings_that_are_alike_agree(trials: Any) -> None:
    courses = []
    for power in ("16", "20"):
        plan = trials.plan("fp16.py", "--power", power, micro_batch=32, window=SHORT)
        result = completed(trials.start(plan).result())
        course = LossCourse(plan.candidate, {"fp16": {"enabled": True}}, [result.losses], [result.initial_weights])
        courses.append(dataclasses.replace(course, skipped=[result.skipped_steps]))
    own, other = courses
    assert len(own.skipped[0]) < len(other.skipped[0])
    found = compare(own, other)
    assert found.agrees, found.sentence
    assert "then the loss scaling skips other steps" in found.sentence
    assert not compare(*(dataclasses.replace(course, skipped=()) for course in courses)).agrees


def profiled(trials: Any, script: str, *arguments: str, **sections: Any) -> tuple[TrialResult, ProgramProfile]:
    """Runs a program as it was typed, as a profile trial does; its configuration has some sections besides."""
    plan = trials.plan(script, *arguments, purpose=Purpose.PROFILE, window=StepWindow(1, 1, max_steps=1))
    plan = dataclasses.replace(plan, as_typed=True, ds_config={**plan.ds_config, **sections})
    result = completed(trials.start(plan).result())
    assert result.program is not None
    return result, result.program


@pytest.mark.parametrize(
    ("how", "formats", "bytes_per_param"),
    [
        ("cast", ["bfloat16"], 2),
        pytest.param("around", ["bfloat16", "float32"], 4, marks=pytest.mark.long),
        ("within", ["bfloat16", "float32"], 4),
        pytest.param("recomputed", ["bfloat16", "float32"], 4, marks=pytest.mark.long),
        ("nowhere", ["float32"], 4),
    ],
)
def test_precision_that_stands_in_the_code_is_found(
    trials: Any, how: str, formats: list[str], bytes_per_param: int
) -> None:
    result, program = profiled(trials, "half_by_code.py", "--how", how)
    assert program.formats == formats
    assert result.profile is not None
    assert result.profile.bytes_per_param == bytes_per_param


@pytest.mark.devices(1, "cuda")
@pytest.mark.parametrize("how", ["tf32", "nowhere"])
def test_tf32_that_the_code_allows_is_found(trials: Any, how: str) -> None:
    _, program = profiled(trials, "half_by_code.py", "--how", how)
    has_it = how == "tf32" and torch.cuda.get_device_capability() >= (8, 0)
    assert program.formats == (["float32", "tf32"] if has_it else ["float32"])


@pytest.mark.parametrize(
    ("script", "section", "dtype"), [("fp16.py", "fp16", "float16"), ("half_by_code.py", "bf16", "bfloat16")]
)
def test_precision_of_the_configuration_is_found_on_the_engine(
    trials: Any, script: str, section: str, dtype: str
) -> None:
    how = ["--how", "nowhere"] if section == "bf16" else []
    result, program = profiled(trials, script, *how, **{section: {"enabled": True}})
    assert program.settled[section] == {"enabled": True}
    assert program.formats == [dtype]
    assert result.profile is not None
    assert result.profile.bytes_per_param is None


@pytest.mark.parametrize("how", ["cast", pytest.param("around", marks=pytest.mark.long)])
def test_a_batch_cut_otherwise_rounds_otherwise_in_16_bits_and_agrees_all_the_same(trials: Any, how: str) -> None:
    _, program = profiled(trials, "half_by_code.py", "--how", how)
    courses = []
    for micro_batch, accumulation, stage in ((8, 1, 0), (2, 4, 2)):
        options = {"micro_batch": micro_batch, "accumulation": accumulation, "zero": {"stage": stage}}
        plan = trials.plan("half_by_code.py", "--how", how, window=SHORT, **options)
        result = completed(trials.start(plan).result())
        candidate = Candidate(micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation, slots=1)
        courses.append(
            LossCourse(candidate, plan.ds_config, [result.losses], [result.initial_weights], program.formats)
        )
    found = compare(*courses)
    assert found.agrees, found.sentence
    assert found.sentence.startswith("the losses of the first 8 steps agree; ")
