"""Figures over all ranks, by which they agree. Every rank of a trial calls these functions at the same moments."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trial_lib.measure.ends.meeting import Meeting

# Time for every rank to write a few figures.
_MEETING_S = 60.0


class NoAgreementError(Exception):
    """A rank has not delivered its figures."""


def most(values: list[float], engine: Any) -> list[float]:
    """Returns the largest of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.MAX, engine)


def total(values: list[float], engine: Any) -> list[float]:
    """Returns the sum of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.SUM, engine)


def of_each(values: list[float], engine: Any) -> list[list[float]]:
    """Returns the values of each rank, in rank order."""
    ranks, width = torch.distributed.get_world_size(), len(values)
    own = torch.distributed.get_rank() * width
    summed = total([*[0.0] * own, *values, *[0.0] * (ranks * width - own - width)], engine)
    return [summed[start : start + width] for start in range(0, ranks * width, width)]


@contextlib.contextmanager
def by_messages(meeting: Meeting) -> Iterator[None]:
    """Makes the ranks agree by messages while this is entered.

    The program may be in a collective, or may have no process group.
    """
    _meetings.append(meeting)
    try:
        yield
    finally:
        _meetings.pop()


_meetings: list[Meeting] = []


def _reduced(values: list[float], operation: Any, engine: Any) -> list[float]:
    if _meetings:
        brought = _meetings[-1].gather(values, _MEETING_S)
        if brought is None:
            raise NoAgreementError
        reduce = max if operation == torch.distributed.ReduceOp.MAX else sum
        return [float(reduce(column)) for column in zip(*brought, strict=True)]
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(tensor, op=operation)
    return [float(value) for value in tensor.tolist()]
