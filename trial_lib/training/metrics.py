"""The results of `train_batch` and `evaluate_batch`, averaged over batches and ranks."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np
import torch

from trial_lib.training.distributed import DistributedContext
from trial_lib.training.invalid_trial import InvalidTrialError


def as_metrics(returned: Any, where: str) -> dict[str, Any]:
    """Returns the result of a batch as metrics by name.

    Args:
        returned: a dict, which is kept, or, from `train_batch`, the loss as a tensor.
        where: the method that returned it, `train_batch` or `evaluate_batch`.

    Raises:
        InvalidTrialError: it is something else.
    """
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
    """Returns metrics without their graphs, and so without activations, to keep for a while."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def as_number(value: Any) -> float | None:
    """Returns a scalar as a float; None for other values.

    Scalars are numbers (including bool), numpy's scalars, and tensors and arrays of one element. It waits for a
    tensor's device.
    """
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or value.is_complex() else float(value.item())
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, (Real, np.bool_)) else None


def described(value: Any) -> str:
    """Returns a description of a value for a message: its type, and the shape of a tensor or an array."""
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

    Args:
        strict_keys: whether every batch and every rank has to return the same metrics. True for `evaluate_batch`. A
            metric of `train_batch` may come and go.
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
        """Adds the metrics of one batch.

        Raises:
            InvalidTrialError: a metric is not a scalar, its name is not a string, or, with strict keys, this batch
                returned others than the first.
        """
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
        """Returns the mean of each metric since the last call, the same on every rank. Call it on every rank.

        Args:
            distributed: the ranks.
            contributes: whether this rank's batches count.

        Raises:
            InvalidTrialError: with strict keys, contributing ranks had other metrics than the first of them.
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
        """Returns the sum and the number of batches of each metric. It waits once for each device."""
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
