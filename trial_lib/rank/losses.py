"""The losses of the first optimizer steps, and the weights that they started from, for comparing trials."""

import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from zerotune.trial_lib.rank.meeting import total
from zerotune.trial_lib.rank.tensor_parallel import expert_group, shards, tensor_parallel_size

# A fingerprint that shows whether two trials have started from the same weights, however each keeps them

_ELEMENTS = 64  # the first elements of each parameter
# Each parameter has its own factor, so that two that have changed places show.
_WEIGHTS = 7


class InitialWeights:
    """The weights of an engine, which has not trained, at the moment when this object is made."""

    def __init__(self, engine: Any) -> None:
        self._sums: tuple[float, float] | None = (0.0, 0.0)
        replicas = int(getattr(engine, "seq_dp_world_size", engine.dp_world_size))
        group, divided = tensor_parallel_size(engine), shards(engine)
        for number, parameter in _numbered(engine.module):
            found, shard = _part(parameter), divided.get(id(parameter))
            if found is None or (shard is None and id(parameter) in divided):
                self._sums = None
                return
            start, part = found
            if shard is not None:
                places = shard.places(torch.arange(start, start + part.numel(), device=part.device))
                part = part[places < _ELEMENTS]
            # Rounded to the coarsest format in which any engine keeps them.
            values = part.to("cpu", torch.bfloat16).double() * (1 + number % _WEIGHTS)
            holders = 1 if hasattr(parameter, "ds_tensor") else _holders(parameter, replicas)
            if shard is None:
                holders *= group
            before, squares_before = self._sums
            self._sums = (
                before + float(values.sum()) / holders,
                squares_before + float(values.square().sum()) / holders,
            )

    def over_ranks(self, engine: Any) -> list[float]:
        """Sum and sum of squares over all ranks; empty if unknown. Every rank takes part."""
        *sums, unknown = total([*(self._sums or (0.0, 0.0)), float(self._sums is None)], engine)
        return [] if unknown else sums


def _numbered(module: Any) -> Iterator[tuple[int, Any]]:
    # The parameters of this rank, each with a number that it has in every layout. A stage of a pipeline has names of
    # the whole model (deepspeed/runtime/pipe/module.py). Stages with tied layers have copies, of which one counts. In
    # other models a wrapper may change the names, so the order numbers the parameters. Experts come last: a rank may
    # have some of them, and all ranks have the other parameters.
    if not hasattr(module, "_layer_specs"):
        experts = list(_experts(module))
        of_experts = {id(parameter) for _, parameter in experts}
        yield from enumerate(each for each in module.parameters() if id(each) not in of_experts)
        yield from experts
        return
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "ds_pipe_replicated", False):
            yield zlib.crc32(name.encode()), parameter


def _experts(module: Any) -> Iterator[tuple[int, Any]]:
    # An expert has its number on whichever rank it is. Each rank of a group has as many experts of a layer as the
    # others, in the order of the ranks (deepspeed/moe/layer.py).
    layers = (each.deepspeed_experts for each in module.modules() if hasattr(each, "deepspeed_experts"))
    for layer, experts in enumerate(layers):
        for place, expert in enumerate(experts):
            for position, parameter in enumerate(each for each in expert.parameters() if expert_group(each)):
                number = place + len(experts) * _expert_rank(parameter)
                yield zlib.crc32(f"{layer}.{number}.{position}".encode()), parameter


def _expert_rank(parameter: Any) -> int:
    from deepspeed.utils import groups

    return int(groups._get_expert_parallel_rank(expert_group(parameter)))


def _holders(parameter: Any, replicas: int) -> int:
    # How many ranks keep a parameter. An expert's is kept by a part of the replicas.
    name = expert_group(parameter)
    if not name:
        return replicas
    from deepspeed.utils import groups

    return int(groups._get_expert_data_parallel_world_size(name))


def _part(parameter: Any) -> tuple[int, torch.Tensor] | None:
    # This rank's share of a parameter's first elements, and where it begins; None if not in memory.
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return None if parameter.is_meta else (0, parameter.detach().reshape(-1)[:_ELEMENTS])
    if getattr(getattr(partition, "status", None), "name", "") != "AVAILABLE":
        return None
    start = torch.distributed.get_rank(parameter.ds_process_group) * partition.numel()
    # The last partition may be longer than the rest of the parameter.
    part: torch.Tensor = partition.reshape(-1)[: max(0, min(_ELEMENTS, parameter.ds_numel) - start)]
    return start, part.detach()


# The losses of the first optimizer steps, which show whether two configurations train alike

_MOST = 16


class StepLosses:
    """The loss of each of the first optimizer steps of this rank, still on its device."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._applied: list[bool] = []
        self._weights: InitialWeights | None = None

    def begin(self, engine: Any) -> None:
        self._weights = InitialWeights(engine)

    def add(self, loss: torch.Tensor | None, applied: bool = True) -> None:
        """Adds the next step's loss, if the code shows one. Not `applied`: fp16's loss scaling has skipped the step."""
        if loss is not None and len(self._losses) < _MOST:
            self._losses.append(loss)
            self._applied.append(applied)

    def keep(self, count: int) -> None:
        del self._losses[count:], self._applied[count:]

    def over_ranks(self, engine: Any) -> dict[str, list[float] | list[int]]:
        """The losses and the initial weights for the trial's record. Every rank takes part."""
        weights = [] if self._weights is None else self._weights.over_ranks(engine)
        # Ranks skip a step together.
        skipped = [number for number, applied in enumerate(self._applied, 1) if not applied]
        return {"losses": self.means(engine), "skipped_steps": skipped, "initial_weights": weights}

    def means(self, engine: Any) -> list[float]:
        """The mean of each loss over all ranks, up to the first that is not finite. Every rank takes part."""
        own = [float(loss) for loss in self._losses]
        missing = [0.0] * (_MOST - len(own))
        # Every rank needs a list of the same length, however many losses it has.
        summed = total([*own, *missing, *(1.0 for _ in own), *missing], engine)
        means = [loss / count for loss, count in zip(summed[:_MOST], summed[_MOST:], strict=True) if count]
        return list(itertools.takewhile(math.isfinite, means))
