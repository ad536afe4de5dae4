from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trial_lib.foresee.inside.libraries.written_devices import WrittenDevices


def test_parts_that_run_again_in_the_backward_pass_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else attention would take another kernel there than in the forward pass."""
    seen: list[str] = []

    class Seeing(WrittenDevices):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    fake: Any = None
    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", torch.autograd.graph._engine_run_backward)
    mode = Seeing(fake)
    mode.follow_backward_passes()
    weight = torch.ones(3, requires_grad=True)
    with mode:
        loss = checkpoint(lambda weight: torch.sigmoid(weight).sum(), weight, use_reentrant=False)
        loss.backward(gradient=torch.tensor(2.0), retain_graph=True)
    assert seen.count("sigmoid") == 2
    half = torch.sigmoid(torch.ones(3))
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * half * (1 - half))
