"""Trainings in 16 bits, by DeepSpeed's configuration and by the code's own doing, on whatever device this host has."""

from typing import Any

import pytest

from trial_lib.experiment.result import TrialResult
from trial_lib.experiment.window import StepWindow

SHORT = StepWindow(start_step=3, end_step=8, max_steps=6)


def completed(result: TrialResult) -> TrialResult:
    assert result.outcome == "completed", result.reason
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_scaled_loss_is_noted_as_it_was_before(trials: Any, stage: int) -> None:
    """Scaled, the first losses are infinite in fp16: the steps are skipped, and the training is a good one."""
    by_engine, by_loss = (
        completed(trials.run("fp16.py", "--by", by, zero={"stage": stage}, window=SHORT)) for by in ("engine", "scale")
    )
    assert by_loss.losses == by_engine.losses
    assert 1.5 < by_loss.metrics["loss_first"] < 3.0
