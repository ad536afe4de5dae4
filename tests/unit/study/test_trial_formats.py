"""What a trial is told of the numbers that the program calculates with."""

from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.plans import formats_known

FORMATS = ("bfloat16", "float32")


def profiled(**profile: Any) -> TrialResult:
    return TrialResult(
        trial_id="study-0000",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="",
        outcome=Outcome.COMPLETED,
        program=ProgramProfile(formats=list(FORMATS)),
        profile=ModelProfile(
            num_params=1,
            trainable_num_params=1,
            activation_mem_per_gpu=1,
            gpu_mem=1,
            data_parallel_size=1,
            flops_per_sample=1.0,
            **profile,
        ),
    )


def candidate(**knobs: Any) -> Candidate:
    return Candidate(micro_batch_size=1, gradient_accumulation_steps=1, knobs=knobs)


@pytest.mark.parametrize(
    ("profile", "knobs", "told"),
    [
        ({}, {"zero_optimization": {"stage": 1}}, FORMATS),
        ({}, {"bf16": {"enabled": False}}, None),
        ({"uncounted": ["flash_attn::forward"]}, {}, None),
    ],
)
def test_a_trial_is_told_the_formats_that_are_its_own(
    profile: dict[str, Any], knobs: dict[str, Any], told: tuple[str, ...] | None
) -> None:
    assert formats_known((profiled(**profile), candidate()), candidate(**knobs)) == told


def test_the_profile_itself_is_told_none() -> None:
    assert formats_known(None, candidate()) is None
