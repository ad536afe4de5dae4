import math

import pytest
import torch

from trial_lib.measure import step_losses


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_before_one_that_is_not_finite_can_be_compared(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr(step_losses, "total", lambda values, engine: values)  # of a single rank
    losses = step_losses.StepLosses()
    for loss in (3.0, 2.0, bad, 1.0):
        losses.add(torch.tensor(loss))
    assert losses.means(engine=None) == [3.0, 2.0]
