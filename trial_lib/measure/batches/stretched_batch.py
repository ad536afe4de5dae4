"""Stretches a batch to the longest length of the data, by repeating positions along the sequence."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from trial_lib.measure.batches.batch_shape import tensors_in, tokens_per_row


def stretched(batch: Any, length: int) -> Any:
    """Returns a batch with sequences of a length. A batch that is as long, or shows no sequence, is returned unchanged.

    The sequence is the second dimension of the first 2-D integer tensor. All other tensors that run along it become as
    long: attention masks, square ones too, labels and position numbers. All values are the data's own, so the model has
    a place for each position number and token.

    Args:
        batch: as a loader gives it.
        length: tokens in a sample.
    """
    current = tokens_per_row(batch)
    if current is None or not 0 < current < length:
        return batch
    samples = next(int(tensor.shape[0]) for tensor in tensors_in(batch) if _is_tokens(tensor))

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        places = torch.arange(length, device=tensor.device) % current
        for axis in _sequence_axes(tensor, samples, current):
            tensor = tensor.index_select(axis, places)
        return tensor

    return _with_tensors(batch, longer)


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tokens_per_row(tensor) is not None


def _sequence_axes(tensor: torch.Tensor, samples: int, length: int) -> list[int]:
    """Returns the dimensions of a tensor along which its sequence runs."""
    if tensor.dim() < 2 or tensor.shape[0] not in (1, samples):
        return []
    axes = [1] if tensor.shape[1] == length else []
    is_square = tensor.dim() > 2 and tuple(tensor.shape[-2:]) == (length, length)
    # Floating-point numbers of three dimensions are features. There may be as many features as tokens by chance.
    if is_square and (tensor.dim() > 3 or not tensor.is_floating_point()):
        axes += [axis for axis in (tensor.dim() - 2, tensor.dim() - 1) if axis not in axes]
    return axes


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of nested mappings and sequences with other tensors, because a data set may keep the original."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _with_tensors(item, change)
        return copied
    if isinstance(value, Mapping):
        return {key: _with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
