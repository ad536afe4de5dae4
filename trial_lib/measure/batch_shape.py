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


def arrived_rows(inputs: Any, asked: int) -> int | None:
    """Returns the rows of one micro-batch, or None if its inputs hold no tensor with a batch dimension.

    The batch is the first dimension of the first tensor. Sequence-first inputs (`(sequence, batch, ...)`) are known
    by a second dimension that is the size asked for; a matrix of floating-point numbers has features there.

    Args:
        inputs: what `forward` was called with, arguments and keyword arguments.
        asked: the rows that are expected.
    """
    first = next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 0), None)
    if first is None:
        return None
    size = int(first.shape[0])
    if size == asked or first.dim() < 2 or first.shape[1] != asked:
        return size
    has_features = first.dim() == 2 and first.is_floating_point()
    return size if has_features else asked


def tokens_per_row(inputs: Any) -> int | None:
    """Returns the tokens in one row, where the inputs show them: the length of the first 2-D integer tensor."""
    for tensor in tensors_in(inputs):
        if tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32):
            return int(tensor.shape[1])
    return None
