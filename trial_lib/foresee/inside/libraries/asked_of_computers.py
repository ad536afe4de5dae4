"""What libraries and programs ask of a computer, in a foreseen run: the CPU or CUDA, arrays, objects of other ranks.

A program that asks for the CPU, or insists on CUDA, gets the pretended device. Values that it takes out of fake tensors
as a whole are given as they are if they are known. Unknown ones are given as ones, and the ask is recorded. Rank 0 is
the only rank that exists, so objects of all ranks are its own, and a sum over ranks is as often its own.
"""

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp

from trial_lib.foresee.inside.asks import Asks
from trial_lib.foresee.inside.known_numbers import known_numbers, used
from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in


def install(asks: Asks) -> None:
    """Replaces the functions. Call it once, before the program runs.

    Args:
        asks: records them.
    """
    os.environ.pop("ACCELERATE_USE_CPU", None)
    when_imported("transformers.training_args", _in_the_trainer)
    when_imported("accelerate.state", _in_accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.accelerators.cuda", _in_lightning)
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
        used(known)
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
            # A default device is a mode of Python's calls, so the original calls the function of this name once more.
            return original(tensor, op, group, async_op)
        is_inside = True
        try:
            work = original(tensor, op, group, async_op)
        finally:
            is_inside = False
        numbers = known_numbers(tensor) if isinstance(tensor, FakeTensor) else tensor
        if numbers is not None and op == ReduceOp.SUM and numbers.dtype != torch.bool:
            numbers.detach().mul_(torch.distributed.get_world_size(group))
        return work

    stand_in("all_reduce", original, all_reduce)


def _keep_random_states(module: ModuleType) -> None:
    original: Any = module.synchronize_rng_states

    @functools.wraps(original)
    def synchronize_rng_states(*args: Any, **kwargs: Any) -> None:
        """Replaces the exchange of states, which all ranks have from rank 0."""

    stand_in("synchronize_rng_states", original, synchronize_rng_states)


def _in_the_trainer(module: ModuleType) -> None:
    arguments_class: Any = module.TrainingArguments
    original = arguments_class.__post_init__

    @functools.wraps(original)
    def check(arguments: Any) -> None:
        """Replaces `TrainingArguments.__post_init__`."""
        for name in ("use_cpu", "no_cuda"):
            if getattr(arguments, name, False):
                setattr(arguments, name, False)
        original(arguments)

    arguments_class.__post_init__ = check


def _in_accelerate(module: ModuleType) -> None:
    state_class: Any = module.PartialState
    original = state_class.__init__

    @functools.wraps(original)
    def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        """Replaces `PartialState.__init__`."""
        original(state, cpu=False, **kwargs)

    state_class.__init__ = init


def _in_lightning(module: ModuleType) -> None:
    # It would refuse a device of another name, and set up kernels.
    module.CUDAAccelerator.setup_device = lambda accelerator, device: None
