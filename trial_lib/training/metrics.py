"""The results of `train_batch` and `evaluate_batch`, averaged over batches and ranks."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerotune.trial_lib.messages.files import MetricsRecord, append
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError


def as_metrics(returned: Any, where: str) -> dict[str, Any]:
    """The result of `train_batch` or `evaluate_batch` (`where`) as metrics by name. A lone tensor is the loss."""
    if isinstance(returned, dict):
        return returned
    if where == "train_batch":
        if isinstance(returned, torch.Tensor):
            return {"loss": returned}
        expected = 'the loss as a tensor, or a dict of metrics such as {"loss": loss}'
    else:
        expected = 'a dict of metrics such as {"validation_loss": loss}'
    raise InvalidTrialError(f"{where} returned {described(returned)}: it has to return {expected}.")


def detached(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without their graphs, and so without activations, to keep for a while."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def as_number(value: Any) -> float | None:
    """A scalar as a float; None for other values. It waits for a tensor's device.

    Scalars are numbers (including bool), numpy's scalars, and tensors and arrays of one element.
    """
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or value.is_complex() else float(value.item())
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, (Real, np.bool_)) else None


def described(value: Any) -> str:
    """A value for a message: its type, and the shape of a tensor or an array."""
    if value is None:
        return "None"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        kind = f"{'complex ' if 'complex' in str(value.dtype) else ''}{kind} of shape {tuple(value.shape)}"
    else:
        kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


class MetricAverager:
    """Averages the metrics of batches, and of ranks.

    A metric is the mean over the batches that returned it, over all ranks. So each rank is weighted by its batches. A
    loss that is not finite makes its mean not finite. Adding never waits for a device: tensors are summed on it, in
    double precision if it has that.

    With strict keys, every batch and every rank has to return the same metrics, as `evaluate_batch` does. A metric of
    `train_batch` may come and go.
    """

    def __init__(self, strict_keys: bool = False) -> None:
        self._strict_keys = strict_keys
        self._where = "evaluate_batch" if strict_keys else "train_batch"
        self._start_anew()

    def _start_anew(self) -> None:
        self._batches = 0
        self._counts: dict[str, int] = {}
        # A metric may be a tensor in one batch and a number in another. Its sum has both parts.
        self._tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, float] = {}

    def add(self, metrics: dict[str, Any]) -> None:
        counts = self._counts
        if self._strict_keys and self._batches and metrics.keys() != counts.keys():
            raise InvalidTrialError(
                f"evaluate_batch returned other metrics in batch {self._batches} than in batch 0 "
                f"({_difference(counts, metrics)}): return the same ones for every batch."
            )
        for name, value in metrics.items():
            if name not in counts:
                self._check_name(name)
                counts[name] = 0
            if isinstance(value, torch.Tensor):
                self._add_tensor(name, value)
            else:
                number = as_number(value)
                if number is None:
                    raise self._no_scalar(name, value)
                self._numbers[name] = self._numbers.get(name, 0.0) + number
            counts[name] += 1
        self._batches += 1

    def average(self, distributed: DistributedContext, contributes: bool = True) -> dict[str, float]:
        """The mean of each metric since the last call, the same on every rank. Call it on every rank.

        `contributes` says whether this rank's batches count.
        """
        mine = self._sums() if contributes and self._batches else None
        self._start_anew()
        ranks = {rank: sums for rank, sums in enumerate(distributed.allgather(mine)) if sums is not None}
        if self._strict_keys and ranks:
            first = min(ranks)
            for rank, sums in ranks.items():
                if sums.keys() != ranks[first].keys():
                    raise InvalidTrialError(
                        f"evaluate_batch returned other metrics on rank {rank} than on rank {first} "
                        f"({_difference(ranks[first], sums)}): return the same ones on every rank."
                    )
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for sums in ranks.values():
            for name, (total, count) in sums.items():
                totals[name] = totals.get(name, 0.0) + total
                counts[name] = counts.get(name, 0) + count
        return {name: total / counts[name] for name, total in totals.items()}

    def _add_tensor(self, name: str, value: torch.Tensor) -> None:
        if value.numel() != 1 or value.is_complex():
            raise self._no_scalar(name, value)
        value = value.detach()
        total = self._tensors.get(name)
        if total is None:
            # Always a copy, because the sum is written to and the tensor is the user's.
            dtype = torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32
            self._tensors[name] = value.reshape(()).to(dtype, copy=True)
            return
        if value.dim():
            value = value.reshape(())
        if value.device != total.device:
            value = value.to(total.device)
        total.add_(value)

    def _sums(self) -> dict[str, tuple[float, int]]:
        # The sum and the number of batches of each metric. It waits once for each device.
        sums = dict.fromkeys(self._counts, 0.0)
        sums.update(self._numbers)
        for device in {tensor.device for tensor in self._tensors.values()}:
            tensors = {name: tensor for name, tensor in self._tensors.items() if tensor.device == device}
            for name, total in zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True):
                sums[name] += total
        return {name: (total, self._counts[name]) for name, total in sums.items()}

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str):
            raise InvalidTrialError(
                f"{self._where} returned a metric whose name is {described(name)}: names have to be strings."
            )

    def _no_scalar(self, name: str, value: Any) -> InvalidTrialError:
        return InvalidTrialError(
            f'{self._where} returned {described(value)} as the metric "{name}": a metric is one number. Return its '
            "mean, or give it to a reducer (context.wrap_reducer)."
        )


def _difference(expected: Iterable[str], found: Iterable[str]) -> str:
    known, given = list(expected), list(found)
    missing = [name for name in known if name not in given]
    new = [name for name in given if name not in known]
    return "; ".join(
        f"{what}: {', '.join(map(str, names))}" for what, names in (("missing", missing), ("new", new)) if names
    )


# Metrics that are no mean over batches: the trial's own reducers, over all batches and ranks.


class MetricReducer(ABC):
    """A metric that is reduced in two steps: on each rank, then over the ranks.

    The trial passes values to it, for example by an `update` method.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forgets all values, because a training or validation phase begins."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """This rank's contribution, which is pickled. Tensors in containers arrive as CPU tensors."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """The metric (one number), or several in a dict if the reducer has no name.

        It runs on rank 0 alone, and the others receive its result. `per_slot_metrics` are the results of
        `per_slot_reduce`, by rank, for each rank that contributes.
        """


class FunctionReducer(MetricReducer):
    """Keeps all values and passes them to a function.

    It takes the list of all values since the last reset, rank by rank, in the order of the updates. Tensors in it are
    detached and on the CPU. It returns as `cross_slot_reduce` does, and runs on rank 0 alone.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Adds a value without a copy. Clone a buffer that is written again.

        Tensors on a device are copied to main memory, so that an epoch's predictions do not fill the device. From CUDA
        the copy does not wait for the device.
        """
        self._values.append(_map_tensors(_leaving_the_device, value))

    def reset(self) -> None:
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # some may still be on their way
        return self._values

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        return self._function([value for values in per_slot_metrics for value in values])


@dataclass(frozen=True)
class _Wrapped:
    reducer: MetricReducer
    label: str
    name: str | None
    for_training: bool
    for_validation: bool

    def is_for(self, training: bool) -> bool:
        return self.for_training if training else self.for_validation


class Reducers:
    """The reducers of a trial.

    A reducer for training and validation has one store of values. So the loop reports the training metrics before it
    validates, and resets before the first batch of each phase. No value counts in the other phase, and none is lost. A
    validation splits a reporting period in two: the values before it are in the report before it, and those after it in
    the next.
    """

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []
        self._agreed = False

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Adds a reducer, as `DeepSpeedTrialContext.wrap_reducer`. Every rank adds the same ones in the same order."""
        label = str(getattr(reducer, "__name__", type(reducer).__name__) if name is None else name)
        if isinstance(reducer, type):
            raise InvalidTrialError(f'The reducer "{label}" is a class: give an instance, {reducer.__name__}(...).')
        if not isinstance(reducer, MetricReducer) and not callable(reducer):
            raise InvalidTrialError(
                f'The reducer "{label}" is {described(reducer)}: give a function that takes the list of all values, or '
                "a MetricReducer."
            )
        if name is not None and not isinstance(name, str):
            raise InvalidTrialError(f'The reducer "{label}" has {described(name)} for a name: it has to be a string.')
        if not for_training and not for_validation:
            raise InvalidTrialError(
                f'The reducer "{label}" is for neither training nor validation: give for_training=True or '
                "for_validation=True."
            )
        if name is not None and any(name == wrapped.name for wrapped in self._wrapped):
            raise InvalidTrialError(f'The reducer "{name}" is wrapped twice: give each reducer a name of its own.')
        kept = reducer if isinstance(reducer, MetricReducer) else FunctionReducer(reducer)
        self._wrapped.append(_Wrapped(kept, label, name, for_training, for_validation))
        return kept

    def reset(self, for_training: bool) -> None:
        for wrapped in self._wrapped:
            if wrapped.is_for(for_training):
                wrapped.reducer.reset()

    def reduce(self, for_training: bool, distributed: DistributedContext, contributes: bool = True) -> dict[str, float]:
        """The metrics of a phase's reducers since the last reset, the same on every rank. Call it on every rank.

        A rank that does not contribute is not asked for its part, because it may have no values. The values of all
        ranks go to rank 0, which alone needs room for them. A reducer's own error is raised there, and the others raise
        an InvalidTrialError.
        """
        self._agree(distributed)
        phase = [wrapped for wrapped in self._wrapped if wrapped.is_for(for_training)]
        if not phase:
            return {}
        mine = [_map_tensors(_on_cpu, wrapped.reducer.per_slot_reduce()) for wrapped in phase] if contributes else None
        gathered = distributed.gather(mine)
        metrics: dict[str, float] = {}
        failure: Exception | None = None
        if gathered is not None:
            try:
                metrics = _reduce_all(phase, [parts for parts in gathered if parts is not None], for_training)
            except Exception as error:  # noqa: BLE001 - a reducer is the user's code, and the others wait to hear of it
                failure = error
        words = None if failure is None else f"A reducer failed on rank 0: {failure!r}."
        if isinstance(failure, InvalidTrialError):
            words = str(failure)
        agreed: dict[str, float]
        agreed, problem = distributed.broadcast((metrics, words))
        if failure is not None:
            raise failure
        if problem is not None:
            raise InvalidTrialError(problem)
        return agreed

    def _agree(self, distributed: DistributedContext) -> None:
        # Checks once that all ranks have the same reducers. Otherwise later exchanges would be garbled.
        if self._agreed:
            return
        mine = [(wrapped.label, wrapped.for_training, wrapped.for_validation) for wrapped in self._wrapped]
        ranks = distributed.allgather(mine)
        for rank, theirs in enumerate(ranks):
            if theirs != ranks[0]:
                raise InvalidTrialError(
                    f"The ranks have different reducers (rank 0: {_labels(ranks[0])}; rank {rank}: {_labels(theirs)}): "
                    "wrap the same ones in the same order, for the same phases, on every rank."
                )
        self._agreed = True


def _reduce_all(phase: list[_Wrapped], ranks: list[list[Any]], for_training: bool) -> dict[str, float]:
    metrics: dict[str, float] = {}
    if not ranks:
        return metrics
    for wrapped, per_slot in zip(phase, zip(*ranks, strict=True), strict=True):
        for name, number in _reduce_over_ranks(wrapped, list(per_slot), for_training).items():
            if name in metrics:
                raise InvalidTrialError(
                    f'The reducer "{wrapped.label}" returned the metric "{name}", which another reducer returned '
                    "too: give one of them another name."
                )
            metrics[name] = number
    return metrics


def _reduce_over_ranks(wrapped: _Wrapped, per_slot: list[Any], for_training: bool) -> dict[str, float]:
    try:
        reduced = wrapped.reducer.cross_slot_reduce(per_slot)
    except Exception as error:
        if isinstance(wrapped.reducer, FunctionReducer) and not any(per_slot):
            phase, batch = ("training", "train_batch") if for_training else ("validation", "evaluate_batch")
            raise InvalidTrialError(
                f'The reducer "{wrapped.label}" failed on an empty list: no {batch} gave it a value. Call its update() '
                f"there, or wrap it with for_{phase}=False."
            ) from error
        raise
    if wrapped.name is not None:
        number = as_number(reduced)
        if number is None:
            raise InvalidTrialError(
                f'The reducer "{wrapped.label}" returned {described(reduced)}: with a name it has to return one '
                "number; wrap it without a name to return several in a dict."
            )
        return {wrapped.name: number}
    if not isinstance(reduced, dict):
        raise InvalidTrialError(
            f'The reducer "{wrapped.label}" returned {described(reduced)}: without a name it has to return a dict of '
            "numbers by name; wrap it with a name to return one number."
        )
    metrics: dict[str, float] = {}
    for name, value in reduced.items():
        number = as_number(value)
        if number is None or not isinstance(name, str):
            raise InvalidTrialError(
                f'The reducer "{wrapped.label}" returned {described(value)} as {name!r}: it has to return a dict of '
                "numbers whose keys are strings."
            )
        metrics[name] = number
    return metrics


def _labels(reducers: list[tuple[str, bool, bool]]) -> str:
    return ", ".join(label for label, *_ in reducers) or "none"


def _leaving_the_device(tensor: torch.Tensor) -> torch.Tensor:
    # A value with its graph would keep the activations of its batch.
    return tensor.detach().to("cpu", non_blocking=tensor.is_cuda)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_tensors(function, item) for item in value]
    if isinstance(value, tuple):
        items = [_map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


# The records of a running training: one JSON object a line. Rank 0 appends them and the driver reads them.
#
#     {"kind": "training", "batch": 100, "epoch": 0, "time": 1763750000.0, "metrics": {"loss": 1.2, "throughput": 95.1}}
#     {"kind": "validation", "batch": 100, "epoch": 0, "time": ..., "metrics": {"validation_loss": 1.3}}
#     {"kind": "checkpoint", "batch": 100, "time": ..., "name": "batch-00000100", "metric": 1.3}
#     {"kind": "note", "time": ..., "text": "a note for the user"}
#
# `batch` counts the finished optimizer steps. A training that went back to a checkpoint appends its batches again.


class Recorder:
    """Appends to the file of records on rank 0, and prints each record. Without a file it does nothing."""

    def __init__(self, path: Path | None, is_writer: bool) -> None:
        self._path = path
        self._is_writer = is_writer

    def training(self, batch: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._append({"kind": "training", "batch": batch, "epoch": epoch, "metrics": dict(metrics)})

    def validation(self, batch: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._append({"kind": "validation", "batch": batch, "epoch": epoch, "metrics": dict(metrics)})

    def checkpoint(self, batch: int, name: str, metric: float | None) -> None:
        self._append({"kind": "checkpoint", "batch": batch, "name": name, "metric": metric})

    def note(self, text: str) -> None:
        self._append({"kind": "note", "text": text})

    def _append(self, record: dict[str, Any]) -> None:
        if not self._is_writer or self._path is None:
            return
        line = json.dumps({**record, "time": time.time()})
        print(MetricsRecord(**record), flush=True)
        append(self._path, line)
