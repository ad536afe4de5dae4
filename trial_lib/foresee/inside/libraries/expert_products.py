"""Products by groups, by which a mixture of experts computes all its experts at once, in a foreseen run.

Torch has no formula of their FLOPs. Its fake implementation takes 16-bit numbers (bfloat16) alone, and its kernel takes
others as well (aten/src/ATen/native/GroupedMMUtils.h).
"""

import functools
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trial_lib.flops.grouped_products import grouped_products
from trial_lib.intercept.post_import import when_imported

_ALSO = (torch.float32, torch.float16)


def install() -> None:
    """Adds the formulas, and replaces the fake implementation. Call it once, before the program runs."""
    flop_registry.update(grouped_products())
    when_imported("transformers.integrations.moe", lambda module: flop_registry.update(grouped_products()))
    kernels: Any = torch._meta_registrations
    # An older torch does not have it.
    original = getattr(kernels, "_meta_grouped_mm_common", None)
    if original is not None:
        kernels._meta_grouped_mm_common = _of_other_formats(original)


def _of_other_formats(original: Any) -> Any:
    @functools.wraps(original)
    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the fake implementation."""
        dtype = mat_a.dtype
        if dtype != mat_b.dtype or dtype not in _ALSO or kwargs.get("scale_a") is not None:
            return original(mat_a, mat_b, *args, **kwargs)  # type: ignore[no-any-return]
        wanted = kwargs.pop("out_dtype", None)
        found = original(mat_a.bfloat16(), mat_b.bfloat16(), *args, **kwargs, out_dtype=torch.bfloat16)
        return found.to(wanted or dtype)  # type: ignore[no-any-return]

    return shape
