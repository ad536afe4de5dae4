"""Values that programs take out of fake tensors as a whole: arrays, objects of other ranks, states of random numbers.

Known numbers are given as they are. Unknown ones are given as ones, and the ask is recorded. Rank 0 is the only rank
that exists, so objects of all ranks are its own.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp

from trial_lib.foresee.inside.asks import Asks
from trial_lib.foresee.inside.fake_tensors import known_numbers
from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in


def install(asks: Asks) -> None:
    """Replaces the functions. Call it once, before the program runs.

    Args:
        asks: records them.
    """
    _replace_numpy(asks)
    _replace_object_collectives()
    _sum_over_ranks()
    when_imported("accelerate.utils.random", _keep_random_states)


def _replace_numpy(asks: Asks) -> None:
    original = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        """Replaces `Tensor.numpy`."""
        if not isinstance(tensor, FakeTensor):
            return original(tensor, force=force)
        known = known_numbers(tensor)
        if known is None:
            value = asks.answer("numpy", tensor.dtype)
            known = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
        return original(known.detach(), force=force)

    torch.Tensor.numpy = numpy  # type: ignore[method-assign, assignment]


def _replace_object_collectives() -> None:
    """Replaces collectives that pickle objects. A fake tensor cannot be pickled."""

    def broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        """Replaces the broadcast: rank 0 is the only source."""

    def all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces the gathering on all ranks."""
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        """Replaces the gathering on one rank."""
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Replaces the scattering."""
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    for function in (broadcast_object_list, all_gather_object, gather_object, scatter_object_list):
        stand_in(function.__name__, getattr(torch.distributed, function.__name__), function)


def _sum_over_ranks() -> None:
    """Gives a sum over all ranks that many times the number of rank 0, as if every rank had the same."""
    original = torch.distributed.all_reduce
    is_inside = False

    def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """Replaces `torch.distributed.all_reduce`."""
        nonlocal is_inside
        if is_inside:
            # The original asks torch's modes, which call the function of this name once more.
            return original(tensor, op, group, async_op)
        is_inside = True
        try:
            work = original(tensor, op, group, async_op)
        finally:
            is_inside = False
        numbers = known_numbers(tensor) if isinstance(tensor, FakeTensor) else tensor
        if numbers is not None and op == ReduceOp.SUM:
            numbers.detach().mul_(torch.distributed.get_world_size(group))
        return work

    stand_in("all_reduce", original, all_reduce)


def _keep_random_states(module: ModuleType) -> None:
    original: Any = module.synchronize_rng_states

    @functools.wraps(original)
    def synchronize_rng_states(*args: Any, **kwargs: Any) -> None:
        """Replaces the exchange of states, which all ranks have from rank 0."""

    stand_in("synchronize_rng_states", original, synchronize_rng_states)
