"""A fingerprint that shows whether two trials have started from the same weights, however each keeps them.

Two runs of a program may start from different weights. Within `deepspeed.zero.Init`, or on a meta device, weights are
drawn in another order, or by another function. Some elements of each parameter show it.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from trial_lib.measure.figures.over_ranks import total

_ELEMENTS = 64  # the first elements of each parameter
# Each parameter has its own factor, so that two that have changed places show.
_WEIGHTS = 7


class InitialWeights:
    """The weights of an engine at the moment when this object is made.

    Args:
        engine: that has not trained.
    """

    def __init__(self, engine: Any) -> None:
        self._sums: tuple[float, float] | None = (0.0, 0.0)
        replicas = int(getattr(engine, "seq_dp_world_size", engine.dp_world_size))
        for number, parameter in _numbered(engine.module):
            part = _part(parameter)
            if part is None:
                self._sums = None
                return
            # Rounded to the coarsest format in which any engine keeps them.
            values = part.detach().to("cpu", torch.bfloat16).double() * (1 + number % _WEIGHTS)
            holders = 1 if hasattr(parameter, "ds_tensor") else replicas
            before, squares_before = self._sums
            self._sums = (
                before + float(values.sum()) / holders,
                squares_before + float(values.square().sum()) / holders,
            )

    def over_ranks(self, engine: Any) -> list[float]:
        """Returns the sum and the sum of squares over all ranks; empty if unknown. Every rank takes part."""
        *sums, unknown = total([*(self._sums or (0.0, 0.0)), float(self._sums is None)], engine)
        return [] if unknown else sums


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    """Yields the parameters of this rank, each with a number that it has in every layout.

    A stage of a pipeline has names of the whole model (deepspeed/runtime/pipe/module.py). Stages with tied layers have
    copies, of which one counts. In other models a wrapper may change the names, so the order numbers the parameters.
    """
    if not hasattr(module, "_layer_specs"):
        yield from enumerate(module.parameters())
        return
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            yield zlib.crc32(name.encode()), parameter


def _part(parameter: Any) -> torch.Tensor | None:
    """Returns this rank's share of a parameter's first elements; None if they are not in memory."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return None if parameter.is_meta else parameter.reshape(-1)[:_ELEMENTS]
    if getattr(getattr(partition, "status", None), "name", "") != "AVAILABLE":
        return None
    start = torch.distributed.get_rank(parameter.ds_process_group) * partition.numel()
    # The last partition may be longer than the rest of the parameter.
    part: torch.Tensor = partition.reshape(-1)[: max(0, min(_ELEMENTS, parameter.ds_numel) - start)]
    return part
