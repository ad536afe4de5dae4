"""Where `torch.load` puts tensors in a foreseen run: on the pretended device, where a real run has them on CUDA.

A file has the device of each tensor. `map_location` may name another one.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trial_lib.foresee.inside import pretended_device

_DEVICES = ("cuda", pretended_device.NAME)
_of_device: dict[int, Any] = {}  # storages of the file that is being read, by their addresses


def lands_on_device(saved_on: str, map_location: Any) -> bool:
    """Returns whether a tensor lands on the device.

    Args:
        saved_on: the device in the file.
        map_location: as `torch.load` has it. A function is not called, and leaves the tensor on the host.
    """
    if isinstance(map_location, Mapping):
        return str(map_location.get(saved_on, saved_on)).startswith(_DEVICES)
    where = saved_on if map_location is None else map_location
    return isinstance(where, (str, torch.device)) and str(where).startswith(_DEVICES)


def load_real(read: Callable[[], Any]) -> Any:
    """Returns what a function reads from a file, with the tensors of the device there.

    Args:
        read: calls torch's own `torch.load`.
    """
    _take_part()
    _of_device.clear()
    try:
        value = read()
        return with_tensors(value, _placed) if _of_device else value
    finally:
        _of_device.clear()


@functools.cache
def _take_part() -> None:
    """Adds a row to torch's table of devices, once. Torch's own rows begin with 10."""
    torch.serialization.register_package(5, lambda storage: None, _deserialized)


def _deserialized(storage: Any, location: str) -> Any:
    if not location.startswith(_DEVICES):
        return None
    # The storage is kept, so that no other one gets its address.
    _of_device[storage.data_ptr()] = storage
    return storage


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    is_there = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in _of_device
    return tensor.to(pretended_device.device()) if is_there else tensor


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a loaded value with other tensors. One that occurs twice stays one. A module keeps its parameters.

    Args:
        value: mappings, lists, tuples and modules with tensors. Anything else stays as it is.
        change: returns the tensor in place of another one.
    """
    changed: dict[int, torch.Tensor] = {}

    def anew(each: Any) -> Any:
        if isinstance(each, torch.nn.Module):
            for tensor in (*each.parameters(), *each.buffers()):
                tensor.data = change(tensor.data)
            return each
        if isinstance(each, torch.Tensor):
            if id(each) not in changed:
                changed[id(each)] = change(each)
            return changed[id(each)]
        if isinstance(each, Mapping):
            return type(each)((name, anew(inner)) for name, inner in each.items())  # type: ignore[call-arg]
        if type(each) in (list, tuple):
            return type(each)(anew(inner) for inner in each)
        return each

    return anew(value)
