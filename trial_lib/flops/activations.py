"""Bytes that a forward pass keeps for the backward pass."""

from types import TracebackType
from typing import Any

import torch


class SavedActivations:
    """Counts the bytes of tensors that autograd saves while this is entered. Parameters do not count.

    The count is exact on every device, and free of the allocator's noise. On a CPU that noise hides the resident memory
    of one sample. A storage that several operations keep counts once.

    Attributes:
        bytes: counted so far.
        dtypes: of all saved tensors, parameters included.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.dtypes: set[torch.dtype] = set()
        self._storages: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.dtypes.add(tensor.dtype)
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> "SavedActivations":
        """Starts counting."""
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        """Stops counting."""
        self._hooks.__exit__(kind, error, trace)
        self._storages.clear()
