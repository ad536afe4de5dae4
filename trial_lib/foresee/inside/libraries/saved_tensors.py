"""What `torch.save` and `torch.load` do with tensors in a foreseen run.

Fake tensors have no numbers, so a file of them would be of no use, and in the way of a real run. What a program saves
of them stays in this process, where the program can load it again. Real tensors that a program loads land on the
pretended device, where a real run has them on CUDA. A file has the device of each, and `map_location` may name another.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import pretended_device
from trial_lib.intercept.stand_in import stand_in

_DEVICES = ("cuda", pretended_device.NAME)
# Of the file that is being read: the storages of the device, by their addresses, and what has their place there.
_read: dict[int, Any] = {}
_placed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
# What the program has saved, by its path, or by the mark that stands in an open file in its place.
_saved: dict[str, Any] = {}
_DEEPEST = 4
_MARK, _DIGITS = "zerotune: tensors without numbers ", 12


def keeping(original: Any) -> Any:
    """Returns a function that saves, and keeps what has fake tensors in this process.

    Args:
        original: saves a value, its first argument, in a file, its second.
    """

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces a function that saves."""
        if not has_fakes(obj):
            return original(obj, f, *args, **kwargs)
        if isinstance(f, (str, os.PathLike)):
            _saved[os.path.abspath(f)] = _copied(obj)  # noqa: PTH100 - of whatever the program calls a path
        elif hasattr(f, "write"):
            # The program may copy the bytes, such as into another buffer.
            name = f"{_MARK}{len(_saved):0{_DIGITS}}"
            _saved[name] = _copied(obj)
            f.write(name.encode())
        return None

    return save


def _copied(value: Any) -> Any:
    """Returns what is saved, as it is now. The program may go on to change its containers."""
    return with_tensors(value, lambda tensor: tensor)


def has_fakes(value: Any, depth: int = 0) -> bool:
    """Returns whether there are fake tensors in a value, its parts or its attributes."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor)
    if isinstance(value, torch.nn.Module):
        return any(isinstance(each, FakeTensor) for each in (*value.parameters(), *value.buffers()))
    if depth > _DEEPEST:
        return False
    if isinstance(value, Mapping):
        return any(has_fakes(each, depth + 1) for each in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(has_fakes(each, depth + 1) for each in value)
    return any(has_fakes(each, depth + 1) for each in getattr(value, "__dict__", {}).values())


def is_saved(f: Any) -> bool:
    """Returns whether the program has saved fake tensors at a path, or in memory."""
    return _name_of(f) in _saved


def _name_of(f: Any) -> str:
    """Returns what the program has saved there by; empty for what is no path and has no mark."""
    if isinstance(f, (str, os.PathLike)):
        return os.path.abspath(f)  # noqa: PTH100
    marked = b""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        place = f.tell()
        marked = f.read(len(_MARK) + _DIGITS)
        f.seek(place)
    return marked.decode() if isinstance(marked, bytes) and marked.startswith(_MARK.encode()) else ""


def load_saved(f: Any, map_location: Any = None) -> Any:
    """Returns what the program has saved there, with tensors of their own. An open file is then read up to its end."""
    name = _name_of(f)
    if name.startswith(_MARK):
        f.seek(len(name), os.SEEK_CUR)

    def loaded(tensor: torch.Tensor) -> torch.Tensor:
        where = pretended_device.device() if lands_on_device(str(tensor.device), map_location) else "cpu"
        return torch.empty_like(tensor, device=where)

    return with_tensors(_saved[name], loaded)


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
    try:
        return read()
    finally:
        _read.clear()
        _placed.clear()


@functools.cache
def _take_part() -> None:
    """Adds a row to torch's table of devices, and replaces what makes tensors of storages."""
    # Torch's own rows begin with 10.
    torch.serialization.register_package(5, lambda storage: None, _deserialized)
    made: Any = torch._utils._rebuild_tensor

    def rebuilt(storage: Any, storage_offset: Any, size: Any, stride: Any) -> torch.Tensor:
        """Replaces `torch._utils._rebuild_tensor`."""
        tensor: torch.Tensor = made(storage, storage_offset, size, stride)
        address = tensor.untyped_storage().data_ptr() if tensor.device.type == "cpu" else 0
        if address not in _read:
            return tensor
        key = address, tensor.dtype
        if key not in _placed:
            # Tensors that share memory go on to do so.
            whole = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            _placed[key] = made(storage, 0, (whole,), (1,)).to(pretended_device.device())
        return torch.as_strided(_placed[key], size, stride, storage_offset)

    torch._utils._rebuild_tensor = rebuilt
    set_state: Any = torch.random.set_rng_state

    def set_rng_state(new_state: torch.Tensor) -> None:
        """Replaces `torch.set_rng_state`. A state of the device's is no part of a foreseen run."""
        if not isinstance(new_state, FakeTensor):
            set_state(new_state)

    stand_in("set_rng_state", set_state, set_rng_state)


def _deserialized(storage: Any, location: str) -> Any:
    if not location.startswith(_DEVICES):
        return None
    # The storage is kept, so that no other one gets its address.
    _read[storage.data_ptr()] = storage
    return storage


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the state of a model with other tensors. One that occurs twice stays one.

    Args:
        value: mappings, lists and tuples with tensors. Anything else stays as it is, such as a whole module.
        change: returns the tensor in place of another one.
    """
    return _anew(value, change, {})


def _anew(value: Any, change: Callable[[torch.Tensor], torch.Tensor], changed: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]
    if isinstance(value, dict):
        anew = copy.copy(value)
        for name, inner in value.items():
            anew[name] = _anew(inner, change, changed)
        return anew
    if type(value) in (list, tuple):
        return type(value)(_anew(inner, change, changed) for inner in value)
    return value
