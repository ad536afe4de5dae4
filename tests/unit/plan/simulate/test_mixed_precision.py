"""Copies of weights in automatic mixed precision: kept where torch's own autocast of the host keeps them."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerotune.trial_lib.plan.simulate.cuda import is_kept

WIDTH = 4


def _weight(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=dtype))


def _turned_without_gradients() -> torch.Tensor:
    """As DeepSpeed's linear layer of stage 3 does it (deepspeed/runtime/zero/linear.py)."""
    with torch.no_grad():
        return _weight().t()


class _Copies(TorchDispatchMode):
    """Counts the copies into another number format."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def _keeps(weight: torch.Tensor, cache: bool) -> bool:
    """Returns whether torch copies a weight once for two products."""
    inputs = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    with _Copies() as copies, torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        for _ in range(2):
            inputs.mm(weight)
    return copies.count == 1


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "made",
    [_weight, lambda: _weight().t(), _turned_without_gradients, lambda: _weight().data, lambda: 2 * _weight()],
    ids=["weight", "view", "view without gradients", "data", "result"],
)
def test_a_copy_is_kept_where_torch_keeps_it(made: Any, cache: bool) -> None:
    weight = made()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        assert is_kept(weight, torch.bfloat16) == _keeps(weight, cache)


def test_no_copy_of_a_higher_precision_is_kept() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_kept(_weight(torch.bfloat16), torch.float32)
