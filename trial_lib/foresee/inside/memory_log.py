"""The log of memory: the life of each storage, its kind and its place.

A storage lives until no tensor uses it. A weak reference on torch's storage object notes the end, in the order in which
an allocator would see it. The log never holds a tensor.
"""

import array
import weakref
from typing import Any

import torch

from trial_lib.foresee.inside import pretended_device
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, MemoryEvent, Moment, Storage

PARAMETER, GRADIENT, OPTIMIZER, ACTIVATION, BUFFER, INPUT, TEMPORARY = range(len(KINDS))
INITIALIZE, LOAD, FORWARD, BACKWARD, UPDATE, BETWEEN = range(len(MOMENTS))
_DEVICE, _HOST, _PINNED, PROCESSOR, THREAD = range(len(PLACES))
# The kind of a storage that nothing else names, by the moment in which it was made.
_KIND_OF = {
    INITIALIZE: BUFFER,
    LOAD: INPUT,
    FORWARD: ACTIVATION,
    BACKWARD: TEMPORARY,
    UPDATE: TEMPORARY,
    BETWEEN: TEMPORARY,
}


class _Life(weakref.ref[Any]):
    """A weak reference to a storage that knows which one it was."""

    __slots__ = ("address", "index")
    address: int
    index: int


class MemoryLog:
    """Notes storages as they are made and freed.

    Args:
        device: the type of the device. Storages elsewhere are on the host.

    Attributes:
        live_bytes: of all live storages on the device.
        peak_bytes: the most of them so far.
        stream: on which new storages of the device are allocated; 0 is the one that computes.
    """

    def __init__(self, device: str = pretended_device.NAME) -> None:
        self._device = device
        self.live_bytes = self.peak_bytes = 0
        self.stream = 0
        self._sizes: list[int] = []
        self._kinds = bytearray()
        self._places = bytearray()
        self._streams = bytearray()
        # Plus and minus the index from 1.
        self._events = array.array("q")
        self._made_at = array.array("q")
        self._living: dict[int, _Life] = {}
        self._moments: list[Moment] = []
        self._kind = BUFFER

    def begin(self, moment: int, step: int, micro_batch: int, operation: int) -> None:
        """Begins a part of the run.

        Args:
            moment: index in `MOMENTS`.
            step: the optimizer step.
            micro_batch: of the step.
            operation: index of its first operation.
        """
        self._kind = _KIND_OF[moment]
        self._moments.append(Moment(moment, step, micro_batch, len(self._events), operation))

    def made(self, tensor: torch.Tensor, kind: int | None = None) -> None:
        """Notes the storage of a new fake tensor, unless it is noted already.

        Args:
            tensor: the tensor.
            kind: index in `KINDS`; None for that of the moment.
        """
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._living:
            return
        life = _Life(storage, self._freed)
        index = len(self._sizes)
        life.index, life.address = index, address
        size = storage.nbytes()
        self._living[address] = life
        self._sizes.append(size)
        self._kinds.append(self._kind if kind is None else kind)
        is_on_device = tensor.device.type == self._device
        self._places.append(_DEVICE if is_on_device else _HOST)
        self._streams.append(self.stream if is_on_device else 0)
        self._made_at.append(len(self._events))
        self._events.append(index + 1)
        if is_on_device:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def made_from_data(self, tensor: torch.Tensor) -> None:
        """Notes a tensor that the program has copied from numbers of the host: a batch, if it is between the passes."""
        self.made(tensor, INPUT if self._moments and self._moments[-1].name == BETWEEN else None)

    def _freed(self, life: "_Life") -> None:
        if self._living.get(life.address) is life:
            del self._living[life.address]
        self._events.append(-life.index - 1)
        if self._places[life.index] == _DEVICE:
            self.live_bytes -= self._sizes[life.index]

    def passing(self, size: int, place: int) -> int:
        """Notes a block that a processor takes beside the results of an operator, and returns its number.

        Args:
            size: bytes.
            place: `PROCESSOR` or `THREAD`.
        """
        index = len(self._sizes)
        self._sizes.append(size)
        self._kinds.append(TEMPORARY)
        self._places.append(place)
        self._streams.append(0)
        self._made_at.append(len(self._events))
        self._events.append(index + 1)
        return index

    def passed(self, number: int) -> None:
        """Notes the end of such a block."""
        self._events.append(-number - 1)

    def name(self, tensor: Any, kind: int) -> None:
        """Names the kind of a tensor's storage. The last name counts."""
        life = self._life_of(tensor)
        if life is not None:
            self._kinds[life.index] = kind

    def pinned(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor of the host is page-locked."""
        life = self._life_of(tensor)
        if life is not None:
            self._places[life.index] = _PINNED

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether it is page-locked."""
        life = self._life_of(tensor)
        return life is not None and self._places[life.index] == _PINNED

    def _life_of(self, tensor: Any) -> "_Life | None":
        return self._living.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None

    def record(self) -> tuple[tuple[Storage, ...], tuple[MemoryEvent, ...], tuple[Moment, ...]]:
        """Returns the storages, the events and the moments so far, as `ForeseenRun` has them."""
        # At a deadline another thread records, and the program goes on. Each event is of a storage that is listed.
        events = tuple(MemoryEvent(abs(each) - 1, int(each > 0)) for each in self._events[:])
        storages = tuple(map(Storage, self._sizes, self._kinds_at_end(), self._places, self._streams))
        return storages, events, tuple(self._moments)

    def _kinds_at_end(self) -> bytearray:
        """Returns the kinds. What the forward pass makes and frees again is no activation."""
        kinds = bytearray(self._kinds)
        bounds = [*(moment.event for moment in self._moments), len(self._events)]
        for position, moment in enumerate(self._moments):
            if moment.name != FORWARD:
                continue
            for event in self._events[bounds[position] : bounds[position + 1]]:
                if event < 0 and kinds[-event - 1] == ACTIVATION and self._made_at[-event - 1] >= moment.event:
                    kinds[-event - 1] = TEMPORARY
        return kinds
