"""One figure of all ranks: what they agree by. Every rank of a trial calls these at the same moments."""

from typing import Any

import torch


def most(values: list[float], engine: Any) -> list[float]:
    """Returns the largest of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.MAX, engine)


def total(values: list[float], engine: Any) -> list[float]:
    """Returns the sum of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.SUM, engine)


def _reduced(values: list[float], operation: Any, engine: Any) -> list[float]:
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(tensor, op=operation)
    return [float(value) for value in tensor.tolist()]
