"""Switches that a rank turns in a program that has no word of them: each has its effect, and losses agree."""

from dataclasses import replace
from typing import Any

import pytest

from trial_lib.records.candidate import Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.wire.step_window import StepWindow

ONE_STEP = StepWindow(1, 1, max_steps=1)
DECODER = ("transformer.py", "--layers", "4", "--hidden", "64", "--length", "32")
CHECKPOINTING, COMPILE = "model:activation_checkpointing", "model:compile"


def ran(trials: Any, turned: dict[str, Any], *program: str, **settings: Any) -> TrialResult:
    plan = replace(trials.plan(*program, **settings), turned=turned)
    result: TrialResult = trials.start(plan).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_recomputed_blocks_keep_fewer_activations_and_the_losses(trials: Any, stage: int) -> None:
    kept: dict[str, int] = {}
    losses: dict[str, list[float]] = {}
    for kind in ("none", "full", "every_second"):
        settings = {"zero": {"stage": stage}, "window": ONE_STEP, "purpose": Purpose.PROFILE}
        result = ran(trials, {CHECKPOINTING: kind}, *DECODER, **settings)
        assert result.profile is not None
        assert result.program is not None
        kept[kind], losses[kind] = result.profile.activation_mem_per_gpu, result.losses
        assert result.program.turnable[CHECKPOINTING] == ["none", "full", "every_second"]
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["every_second"] < 0.8 * kept["none"]
    assert losses["none"]
    assert losses["full"] == losses["every_second"] == losses["none"]
