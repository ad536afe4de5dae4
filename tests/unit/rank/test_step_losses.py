import math

import pytest
import torch

from zerotune.trial_lib.rank import counted_steps as step_losses


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_before_one_that_is_not_finite_can_be_compared(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr(step_losses, "total", lambda values, engine: values)  # of a single rank
    losses = step_losses.StepLosses()
    for loss in (3.0, 2.0, bad, 1.0):
        losses.add(torch.tensor(loss))
    assert losses.means(engine=None) == [3.0, 2.0]


def test_steps_that_were_skipped_are_noted_with_their_losses() -> None:
    losses = step_losses.StepLosses()
    for loss, applied in ((3.0, False), (2.9, False), (2.8, True), (2.7, False), (2.6, True)):
        losses.add(torch.tensor(loss), applied)
    assert losses.skipped == [1, 2, 4]
    losses.keep(3)
    assert losses.skipped == [1, 2]
