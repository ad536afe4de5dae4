"""The repeated blocks of a model that are worth recomputing.

A recomputed block keeps its inputs, and drops what is between them and its outputs (Chen et al., arXiv 1604.06174). A
single operation has nothing there: autograd keeps its inputs or its result, which are kept in any case. So a block has
several operations, as the layers that transformers recomputes (`GradientCheckpointingLayer`) have.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

_FEWEST_BLOCKS = 2
_FEWEST_OPERATIONS = 2
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
# Their backward pass reads the result, or nothing (torch/tools/autograd/derivatives.yaml).
_KEEP_THEIR_RESULT = (
    *(torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Softmax, torch.nn.LogSoftmax),
    *(torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten),
)


def repeated_blocks(model: Any) -> list[Any]:
    """Returns the blocks of the model's lists, in their order, with all other modules of their classes.

    Of lists within each other, the outermost has the blocks: a layer, and not the experts within it. If the members of
    a list are stages, the blocks within them are meant. Blocks of a single operation are left out.
    """
    listed = list(_listed(model))
    kinds = {type(block) for block in listed if type(block) is not torch.nn.Sequential}
    found = _outermost(model, kinds, {id(block) for block in listed})
    # A block may be in two lists. Turned twice, it would be recomputed within its own recomputation.
    return list(dict.fromkeys(filter(_is_worth_it, found)))


def _listed(module: Any) -> Iterator[Any]:
    """Yields the blocks of the outermost lists in a module."""
    blocks = _blocks_of(module)
    if blocks and not _are_stages(blocks):
        yield from blocks
        return
    for child in module.children():
        yield from _listed(child)


def _blocks_of(module: Any) -> list[Any]:
    """Returns the blocks of a list or a sequence; none if it is neither, or if its classes do not repeat.

    Layers of two classes may take turns, as in a mixture of experts. In a sequence these may be single operations.
    """
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
    """Returns whether blocks are stages of a model, such as those of a Swin transformer.

    Most of their parameters are then in lists of blocks that normalise. Experts within a layer do not.
    """
    inner = [each for block in blocks for each in _listed(block)]
    normalise = any("norm" in type(module).__name__.lower() for each in inner for module in each.modules())
    return normalise and 2 * sum(map(_size, inner)) > sum(map(_size, blocks))


def _size(module: Any) -> int:
    return sum(map(_elements, module.parameters()))


def _is_worth_it(block: Any) -> bool:
    return _operations(block) >= _FEWEST_OPERATIONS


def _operations(block: Any) -> int:
    """Returns the operations of a block whose inputs autograd keeps, as far as its modules show them."""
    return sum(_own_operations(module) for module in block.modules())


def _own_operations(module: Any) -> int:
    """Returns a module's operations without those of its children.

    Each matrix has one, as the two of a recurrent layer. Code that calls children has others, such as a sum.
    """
    parameters = list(module.parameters(recurse=False))
    if parameters:
        return max(1, sum(len(getattr(each, "ds_shape", each.shape)) > 1 for each in parameters))
    if any(True for _ in module.children()):
        return int(not isinstance(module, (*_LISTS, torch.nn.Sequential)))
    return int(not isinstance(module, (*_LISTS, torch.nn.Sequential, *_KEEP_THEIR_RESULT)))


def _elements(parameter: Any) -> int:
    """Returns the elements of a parameter, which ZeRO-3 may have partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _outermost(module: Any, kinds: Collection[type], blocks: Collection[int]) -> Iterator[Any]:
    """Yields the modules of some classes, and those with some identities, that are not within another of them."""
    for child in module.children():
        if type(child) in kinds or id(child) in blocks:
            yield child
        else:
            yield from _outermost(child, kinds, blocks)
