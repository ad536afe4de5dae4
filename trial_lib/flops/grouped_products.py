"""The FLOPs of products by groups, which a mixture of experts computes: each group of rows with its own matrix.

Torch's `torch.utils.flop_counter` has no formula for them (torch 2.13).
"""

from collections.abc import Callable
from typing import Any

import torch


def grouped_products() -> dict[Any, Callable[..., int]]:
    """Returns the formulas by operator, as `torch.utils.flop_counter` calls them."""
    found: dict[Any, Callable[..., int]] = {}
    for name in ("_grouped_mm", "_scaled_grouped_mm"):
        if hasattr(torch.ops.aten, name):
            found[getattr(torch.ops.aten, name)] = _flops
    # What transformers computes where torch has no kernel of its own (transformers/integrations/moe.py). Its operators
    # exist from the import of that module on. Until transformers 5.6 the backward pass is none, but plain products.
    for name, flops in (("grouped_mm_fallback", _flops), ("grouped_mm_fallback_backward", _flops_backward)):
        if hasattr(torch.ops.transformers, name):
            found[getattr(torch.ops.transformers, name)] = flops
    return found


def _flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of a product, in which every row of the left side belongs to one group.

    A side of two dimensions has its groups one after the other, and one of three has them in its first dimension.
    """
    flops = 2 * left.numel() * right.shape[-1]
    # Groups of columns: each matrix of the left side meets its own columns alone.
    return flops // left.shape[0] if left.dim() > right.dim() else flops


def _flops_backward(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * _flops(left, right)
