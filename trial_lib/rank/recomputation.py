"""The blocks of a model that are worth recomputing, and the guard that they compute alike."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

_FEWEST_BLOCKS = 2
_FEWEST_OPERATIONS = 2
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
# Their backward pass reads the result, or nothing (torch/tools/autograd/derivatives.yaml).
_KEEP_THEIR_RESULT = (
    *(torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Softmax, torch.nn.LogSoftmax),
    *(torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten),
)


def repeated_blocks(model: Any) -> list[Any]:
    """The blocks of the model's lists, in their order, with all other modules of their classes.

    Of lists within each other, the outermost has the blocks: a layer, and not the experts within it. If the members of
    a list are stages, the blocks within them are meant. Blocks of a single operation are left out.
    """
    listed = list(_listed(model))
    kinds = {type(block) for block in listed if type(block) is not torch.nn.Sequential}
    found = _outermost(model, kinds, {id(block) for block in listed})
    # A block may be in two lists. Turned twice, it would be recomputed within its own recomputation.
    return list(dict.fromkeys(filter(_is_worth_it, found)))


def _listed(module: Any) -> Iterator[Any]:
    blocks = _blocks_of(module)
    if blocks and not _are_stages(blocks):
        yield from blocks
        return
    for child in module.children():
        yield from _listed(child)


def _blocks_of(module: Any) -> list[Any]:
    # None if it is neither a list nor a sequence, or if its classes do not repeat. Layers of two classes may take
    # turns, as in a mixture of experts. In a sequence these may be single operations.
    if not isinstance(module, (*_LISTS, torch.nn.Sequential)):
        return []
    # One block may be there several times. `children` has it once.
    children = [child for child in module._modules.values() if child is not None]
    classes = Counter(map(type, children))
    if not children or min(classes.values()) < _FEWEST_BLOCKS or any(isinstance(each, _LISTS) for each in children):
        return []
    are_worth_it = any(map(_is_worth_it, children)) if len(classes) == 1 else all(map(_is_worth_it, children))
    return children if are_worth_it and any(map(_size, children)) else []


def _are_stages(blocks: Sequence[Any]) -> bool:
    # As those of a Swin transformer: most of their parameters are in lists of blocks that normalise. Experts within a
    # layer do not.
    inner = [each for block in blocks for each in _listed(block)]
    normalise = any("norm" in type(module).__name__.lower() for each in inner for module in each.modules())
    return normalise and 2 * sum(map(_size, inner)) > sum(map(_size, blocks))


def _size(module: Any) -> int:
    return sum(map(_elements, module.parameters()))


def _is_worth_it(block: Any) -> bool:
    return sum(map(_own_operations, block.modules())) >= _FEWEST_OPERATIONS


def _own_operations(module: Any) -> int:
    # Each matrix has one, as the two of a recurrent layer. Code that calls children has others, such as a sum.
    parameters = list(module.parameters(recurse=False))
    if parameters:
        return max(1, sum(len(getattr(each, "ds_shape", each.shape)) > 1 for each in parameters))
    if any(True for _ in module.children()):
        return int(not isinstance(module, (*_LISTS, torch.nn.Sequential)))
    return int(not isinstance(module, (*_LISTS, torch.nn.Sequential, *_KEEP_THEIR_RESULT)))


def _elements(parameter: Any) -> int:
    # The elements of a parameter, which ZeRO-3 may have partitioned.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _outermost(module: Any, kinds: Collection[type], blocks: Collection[int]) -> Iterator[Any]:
    for child in module.children():
        if type(child) in kinds or id(child) in blocks:
            yield child
        else:
            yield from _outermost(child, kinds, blocks)


# The guard: at its first call a block is computed with and without recomputation


class GuardedCheckpoint:
    """Recomputes a block, and compares its first outputs and gradients.

    A partitioned block is not in memory to compare.
    """

    def __init__(self) -> None:
        self._has_compared = False

    def __call__(self, block: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs. ValueError if the block is another one when it is recomputed."""
        # In this order: compiled code must not depend on what has been compared, or it would be compiled again.
        if not torch.compiler.is_compiling() and not self._has_compared and torch.is_grad_enabled():
            self._compare_once(block, forward, args, kwargs)
        return _recomputed(forward, *args, **kwargs)

    def _compare_once(
        self, block: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_real = not any(isinstance(each, FakeTensor) for each in (*_tensors(args), *_tensors(kwargs)))
        if is_real:
            self._has_compared = True
            if not any(hasattr(parameter, "ds_id") for parameter in block.parameters()):
                _compare(block, forward, args, kwargs)


def _recomputed(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # torch keeps the random numbers of the devices of positional inputs only (torch/utils/checkpoint.py
    # get_device_states), and takes some named inputs for its own. So all inputs are positional here.
    if not kwargs:
        return checkpoint(forward, *args, use_reentrant=False)
    by_name = functools.partial(_by_name, forward, tuple(kwargs))
    return checkpoint(by_name, *args, *kwargs.values(), use_reentrant=False)


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    # Calls a forward pass. The last inputs have names.
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _compare(block: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    buffers = [(buffer, buffer._version) for buffer in block.buffers()]
    parameters = [each for each in block.parameters() if each.requires_grad]
    recomputing = functools.partial(_recomputed, forward)
    plain, recomputed = (_computed(each, parameters, args, kwargs) for each in (forward, recomputing))
    name = type(block).__name__
    if any(buffer._version != version for buffer, version in buffers):
        raise ValueError(f"{name} changes its buffers in a forward pass, so it cannot be recomputed.")
    for ours, theirs in zip(plain, recomputed, strict=True):
        # Half of the digits have to agree.
        if (share := _apart(ours, theirs)) > math.sqrt(_roundoff(ours)):
            raise ValueError(f"{name} has other outputs or gradients if it is recomputed: {share:.1%} apart.")


def _apart(plain: list[torch.Tensor], recomputed: list[torch.Tensor]) -> float:
    # How far tensors are apart, all of them together, as a share of their norm. A GPU adds in another order at each
    # call (the backward pass of flash attention does). So elements near zero, and gradients that are zero but for
    # rounding, differ by any factor. Another dropout changes the norm by its own size.
    if [each.shape for each in plain] != [each.shape for each in recomputed]:
        return math.inf
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    apart = sum(float(norm(ours - theirs)) ** 2 for ours, theirs in zip(plain, recomputed, strict=True))
    size = sum(float(norm(each)) ** 2 for each in plain)
    # Numbers that overflow tell nothing.
    return math.sqrt(apart / size) if math.isfinite(size) and size else 0.0


def _roundoff(tensors: list[torch.Tensor]) -> float:
    # The spacing of the numbers next to 1 in the narrowest format that they may have been computed in.
    formats = {each.dtype for each in tensors if each.is_floating_point()}
    for device in {each.device.type for each in tensors}:
        if torch.is_autocast_enabled(device):
            formats.add(torch.get_autocast_dtype(device))
    return max((torch.finfo(each).eps for each in formats), default=0.0)


def _computed(
    forward: Callable[..., Any], parameters: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inputs = [_own(each) for each in args]
    named = {name: _own(each) for name, each in kwargs.items()}
    with torch.random.fork_rng():
        found = forward(*inputs, **named)
        outputs = [each for each in _tensors(found) if each.requires_grad]
        given = [each for each in (*inputs, *named.values()) if isinstance(each, torch.Tensor)]
        wanted = [*(each for each in given if each.requires_grad), *parameters]
        if not outputs or not wanted:
            return [each.detach() for each in outputs], []
        sums = [each.sum() for each in outputs]
        gradients = torch.autograd.grad(sums, wanted, allow_unused=True)
    return [each.detach() for each in outputs], [each.detach() for each in gradients if each is not None]


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else ()
    return [each for part in parts for each in _tensors(part)]
