"""Addresses of fake tensors, by which programs tell tensors apart (`parameter.data_ptr() in seen`).

A fake tensor has no memory, so torch says 0 for each. Here each storage gets a range of its own in a space that nobody
reads. As on a device, it begins at a multiple of 512 bytes, and what is empty has the address 0.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_ALIGNED_BYTES = 512
# Where an address space of a device may begin. No address of the host is as large.
_FIRST = 2**52
_ADDRESS = "_foreseen_address"


class Addresses:
    """Gives ranges out, one after another."""

    def __init__(self) -> None:
        self._next = _FIRST

    def of(self, storage: torch.UntypedStorage) -> int:
        """Returns the address of a storage without memory. One that has grown gets another."""
        size = storage.nbytes()
        if not size:
            return 0
        address, room = getattr(storage, _ADDRESS, (0, -1))
        if size > room:
            address, room = self._next, size
            setattr(storage, _ADDRESS, (address, room))
            self._next += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return int(address)


def install() -> None:
    """Replaces `data_ptr` of fake tensors and of storages. Call it once, before the program runs."""
    addresses = Addresses()
    original: Any = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> Any:
        """Replaces `UntypedStorage.data_ptr`."""
        return addresses.of(storage) if storage.device.type == "meta" else original(storage)

    def of_tensor(tensor: torch.Tensor) -> int:
        """Replaces `FakeTensor.data_ptr`."""
        if not tensor.numel():
            return 0
        return addresses.of(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign, assignment]
    FakeTensor.data_ptr = of_tensor  # type: ignore[method-assign, assignment]
