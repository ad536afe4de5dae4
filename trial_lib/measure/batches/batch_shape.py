"""The size of the batches that a script really feeds to its engine."""

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


def batch_sizes(inputs: Any) -> tuple[int, ...]:
    """Returns the sizes of the first tensor in the dimensions that may be the batch's; empty without a tensor.

    These are the first dimension, and the second for inputs such as `(sequence, batch, ...)`. In a matrix of
    floating-point numbers the second dimension has the features.

    Args:
        inputs: the arguments and keyword arguments of `forward`.
    """
    first = next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 0), None)
    if first is None:
        return ()
    has_features = first.dim() == 2 and first.is_floating_point()
    return tuple(int(size) for size in first.shape[: 1 if has_features else 2])


def shapes_of(inputs: Any) -> list[torch.Tensor]:
    """Returns tensors with the shapes and types of those in the inputs, without their data."""
    return [tensor.detach().to("meta") for tensor in tensors_in(inputs)]


def elements_in(inputs: Any) -> int:
    """Returns how many numbers all tensors have together."""
    return sum(tensor.numel() for tensor in tensors_in(inputs))


def tokens_per_row(inputs: Any) -> int | None:
    """Returns the tokens in one row, which is the length of the first 2-D integer tensor; None without one."""
    tokens = _tokens(inputs)
    return None if tokens is None else int(tokens.shape[1])


def tokens_in(inputs: Any) -> int | None:
    """Returns the tokens in all rows; None if the inputs show none."""
    tokens = _tokens(inputs)
    return None if tokens is None else tokens.numel()


def _tokens(inputs: Any) -> torch.Tensor | None:
    return next(
        (each for each in tensors_in(inputs) if each.dim() == 2 and each.dtype in (torch.int64, torch.int32)), None
    )
