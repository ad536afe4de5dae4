"""Forward passes of one micro-batch with rows in each other's place: what stands where, and what changes."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerotune.trial_lib.rank.device import Device

# A number that is so many times the median is no result, but a mask.
_HUGE = 1e4


class RowSwaps:
    """The rows of a micro-batch in the place of others: those of one half, of the other, of both."""

    def __init__(self, rows: int, per_sample: int, in_blocks: bool) -> None:
        samples = rows // per_sample
        self._rows = [
            [place * samples + sample if in_blocks else sample * per_sample + place for place in range(per_sample)]
            for sample in range(samples)
        ]
        self._half = samples // 2

    @property
    def first(self) -> list[int]:
        """The rows of the first half."""
        return sorted(row for sample in self._rows[: self._half] for row in sample)

    @property
    def second(self) -> list[int]:
        return sorted(row for sample in self._rows[self._half :] for row in sample)

    def order(self, replaces_first: bool, replaces_second: bool) -> list[int]:
        """By row, the row that stands there."""
        order: dict[int, int] = {}
        for sample, rows in enumerate(self._rows):
            is_first = sample < self._half
            instead = self._rows[self._half if is_first else 0]
            order.update(zip(rows, instead if (replaces_first if is_first else replaces_second) else rows, strict=True))
        return [order[row] for row in sorted(order)]


class KeptState:
    """The state of a model and of the random generators, to begin several forward passes alike."""

    def __init__(self, module: torch.nn.Module, device: Device) -> None:
        # DeepSpeed's own attributes follow the passes.
        self._attributes = [
            (each, {name: value for name, value in vars(each).items() if not name.startswith(("_", "ds_"))})
            for each in module.modules()
        ]
        self._buffers = [
            (each._buffers, name, buffer, buffer.clone())
            for each in module.modules()
            for name, buffer in each._buffers.items()
            if buffer is not None
        ]
        self._of_device = getattr(torch, device.kind) if device.is_apart else None
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy, numpy.random.get_state())
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._on_device = None if self._of_device is None else self._of_device.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        for module, attributes in self._attributes:
            for name, value in attributes.items():
                if vars(module).get(name) is not value:
                    vars(module)[name] = value
        for buffers, name, buffer, content in self._buffers:
            buffers[name] = buffer
            buffer.copy_(content)
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            self._numpy[0].random.set_state(self._numpy[1])
        if self._of_device is not None:
            self._of_device.set_rng_state(self._on_device)
        # A parameter that autocast has cast without autograd would get no gradient.
        torch.clear_autocast_cache()


@dataclass
class ForwardPass:
    """The outputs of one forward pass, as far as they are compared."""

    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by place among the outputs, by layout
    scalars: dict[int, torch.Tensor] = field(default_factory=dict)
    output_bytes: int = 0
    # Of each module, in the order of their ends: itself, its first inputs and its first outputs
    modules: list[tuple[torch.nn.Module, Any, Any]] = field(default_factory=list)


def by_rows(tensor: torch.Tensor, rows: int, dimension: int) -> list[torch.Tensor]:
    """Views or copies of a tensor with the rows first, one for each layout that is possible; none if it has no rows."""
    if tensor.dim() > dimension and tensor.shape[dimension] == rows:
        return [tensor.transpose(0, dimension)]
    if tensor.dim() and tensor.shape[0] == rows:
        return [tensor]
    if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % rows:
        return []
    parts = tensor.shape[0] // rows
    beside = tensor.reshape(rows, parts, *tensor.shape[1:])
    return [beside, tensor.reshape(parts, rows, *tensor.shape[1:]).transpose(0, 1)]


def sampled(tensor: torch.Tensor, rows: int, dimension: int, most: int) -> list[torch.Tensor]:
    found = []
    for each in by_rows(tensor.detach(), rows, dimension) if tensor.is_floating_point() else []:
        flat = each.flatten(1) if each.dim() > 1 else each[:, None]
        kept = flat[:, :: -(-flat.shape[1] // most) or 1].float().nan_to_num(0.0, 0.0, 0.0)
        # A mask's huge numbers would hide all others.
        usual = kept.abs().median()
        found.append(kept.where((kept.abs() <= _HUGE * usual) | (usual == 0), 0.0))
    return found


def change_of(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], rows: Sequence[int]) -> float:
    """The relative change of the median row, in the layout that changes least; infinite if it cannot be compared."""
    changes = []
    for one, other in zip(before, after, strict=True):
        kept, changed = one[list(rows)], other[list(rows)]
        size = kept.square().mean().sqrt()
        apart = (kept - changed).square().mean(dim=1).sqrt() / size.clamp_min(torch.finfo(torch.float32).tiny)
        changes.append(float(apart.median()))
    return min((each if each == each else float("inf") for each in changes), default=0.0)
