"""How large the batch is that a script really feeds to its engine."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yields the tensors in nested mappings, sequences and (Hugging Face) model inputs, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def batch_dimension(inputs: Any, expected: int) -> int:
    """Returns which dimension of the first tensor is the batch's: 0, or 1 for inputs such as `(sequence, batch, ...)`.

    These are known by a second dimension that is as expected; a matrix of floating-point numbers has features there.

    Args:
        inputs: what `forward` was called with, arguments and keyword arguments.
        expected: the rows that should arrive.
    """
    first = _first_of_a_batch(inputs)
    if first is None or first.dim() < 2 or first.shape[0] == expected or first.shape[1] != expected:
        return 0
    return 0 if first.dim() == 2 and first.is_floating_point() else 1


def arrived_rows(inputs: Any, dimension: int) -> int | None:
    """Returns the rows of one micro-batch, or None if its inputs hold no tensor with a batch dimension.

    Args:
        inputs: what `forward` was called with, arguments and keyword arguments.
        dimension: the batch's, in the first tensor.
    """
    first = _first_of_a_batch(inputs)
    return None if first is None or first.dim() <= dimension else int(first.shape[dimension])


def _first_of_a_batch(inputs: Any) -> torch.Tensor | None:
    return next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 0), None)


def tokens_per_row(inputs: Any) -> int | None:
    """Returns the tokens in one row, where the inputs show them: the length of the first 2-D integer tensor."""
    for tensor in tensors_in(inputs):
        if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32):
            return int(tensor.shape[1])
    return None
