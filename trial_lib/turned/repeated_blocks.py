"""The repeated blocks of a model that are worth recomputing.

A recomputed block keeps its inputs, and drops what is between them and its outputs (Chen et al., arXiv 1604.06174). A
single operation has nothing there: autograd keeps its inputs or its result, which are kept in any case. So a block has
several operations, as the layers that transformers recomputes (`GradientCheckpointingLayer`) have.
"""

from collections.abc import Iterator
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
    """Returns the modules of the class that repeats most in a list or a sequence of the model, in their order.

    Blocks of a single operation are left out.
    """
    longest: tuple[int, int] = (_FEWEST_BLOCKS - 1, 0)
    found: list[Any] = []
    for module in model.modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = list(module.children())
        if len({type(child) for child in children}) != 1 or isinstance(children[0], _LISTS):
            continue
        size = len(children), sum(_elements(each) for child in children for each in child.parameters())
        if size[1] and size > longest and any(map(_is_worth_it, children)):
            longest, found = size, children
    if found and type(found[0]) is not torch.nn.Sequential:
        found = [*_outermost(model, type(found[0]))]
    # A block may be in two lists. Turned twice, it would be recomputed within its own recomputation.
    return list(dict.fromkeys(filter(_is_worth_it, found)))


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


def _outermost(module: Any, kind: type) -> Iterator[Any]:
    """Yields the modules of a class that are not within another of it."""
    for child in module.children():
        if type(child) is kind:
            yield child
        else:
            yield from _outermost(child, kind)
