"""Checkpoints of a foreseen run: weights come from a file's header, so that no model is read from a disk.

`from_pretrained` of a local checkpoint opens safetensors files, or pickles with `torch.load`. Both have the shape and
the number format of each tensor before its numbers. A small tensor of whole numbers is read as it is, because code may
look at it. The format: https://github.com/huggingface/safetensors (a length of 8 bytes, then JSON).
"""

import contextlib
import copy
import functools
import json
import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zerotune.trial_lib.plan.simulate import pretended_device
from zerotune.trial_lib.plan.simulate.asks import CannotForeseeError
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.logs import place_in_program
from zerotune.trial_lib.rank.loader_batches import tensors_in
from zerotune.trial_lib.rank.patching import Change, Patch, Table, around, with_given

# What `torch.save` and `torch.load` do with tensors in a foreseen run.

_DEVICES = ("cuda", pretended_device.NAME)
# Of the file that is being read: the storages of the device, by their addresses, and what has their place there.
_read: dict[int, Any] = {}
_placed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
# What the program has saved, by its path, or by the mark that stands in an open file in its place.
_saved: dict[str, Any] = {}
_DEEPEST = 4
_MARK, _DIGITS = "zerotune: tensors without numbers ", 12


def keep_fakes(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves a value in a file by the original. A value with fake tensors stays in this process."""
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


def _copied(value: Any) -> Any:
    # What is saved, as it is now. The program may go on to change its containers.
    return with_tensors(value, lambda tensor: tensor)


def has_fakes(value: Any, depth: int = 0) -> bool:
    """Whether there are fake tensors in a value, its parts or its attributes."""
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
    """Whether the program has saved fake tensors at a path, or in memory."""
    return _name_of(f) in _saved


def _name_of(f: Any) -> str:
    # What the program has saved there by; empty for what is no path and has no mark.
    if isinstance(f, (str, os.PathLike)):
        return os.path.abspath(f)  # noqa: PTH100
    marked = b""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        place = f.tell()
        marked = f.read(len(_MARK) + _DIGITS)
        f.seek(place)
    return marked.decode() if isinstance(marked, bytes) and marked.startswith(_MARK.encode()) else ""


def load_saved(f: Any, map_location: Any = None) -> Any:
    """What the program has saved there, with tensors of their own. An open file is then read up to its end."""
    name = _name_of(f)
    if name.startswith(_MARK):
        f.seek(len(name), os.SEEK_CUR)

    def loaded(tensor: torch.Tensor) -> torch.Tensor:
        where = pretended_device.device() if lands_on_device(str(tensor.device), map_location) else "cpu"
        return torch.empty_like(tensor, device=where)

    return with_tensors(_saved[name], loaded)


def lands_on_device(saved_on: str, map_location: Any) -> bool:
    """Whether a tensor lands on the device. A function as `map_location` is not called, and leaves the tensor on the
    host.
    """
    if isinstance(map_location, Mapping):
        return str(map_location.get(saved_on, saved_on)).startswith(_DEVICES)
    where = saved_on if map_location is None else map_location
    return isinstance(where, (str, torch.device)) and str(where).startswith(_DEVICES)


def load_real(read: Callable[[], Any]) -> Any:
    """Calls torch's own `torch.load`, with the tensors of the device there."""
    try:
        return read()
    finally:
        _read.clear()
        _placed.clear()


def _rebuild_tensor(original: Any, storage: Any, storage_offset: Any, size: Any, stride: Any) -> torch.Tensor:
    tensor: torch.Tensor = original(storage, storage_offset, size, stride)
    address = tensor.untyped_storage().data_ptr() if _read and tensor.device.type == "cpu" else 0
    if address not in _read:
        return tensor
    key = address, tensor.dtype
    if key not in _placed:
        # Tensors that share memory go on to do so.
        whole = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        _placed[key] = original(storage, 0, (whole,), (1,)).to(pretended_device.device())
    return torch.as_strided(_placed[key], size, stride, storage_offset)


def _set_rng_state(original: Any, new_state: torch.Tensor) -> None:
    if not isinstance(new_state, FakeTensor):
        original(new_state)


@functools.cache
def _register_device() -> None:
    torch.serialization.register_package(5, lambda storage: None, _deserialized)


def _deserialized(storage: Any, location: str) -> Any:
    if not location.startswith(_DEVICES):
        return None
    # The storage is kept, so that no other one gets its address.
    _read[storage.data_ptr()] = storage
    return storage


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A state of mappings, lists and tuples with other tensors. One that occurs twice stays one."""
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


Make = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a fake tensor of a shape and a number format on the host."""

_FORMATS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Whole numbers of this size at most are read. Quantised weights are larger.
_READ_BYTES = 2**16
# What transformers looks for first where it loads a model.
_OF_MODEL = "config.json"
_OF_WEIGHTS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
# Folders of models that the program would have saved.
_unsaved: set[str] = set()
# A pickle of fewer bytes is loaded as it is, because it may be data.
_SMALL_PICKLE_BYTES = 2**24


class Header:
    """Number format, shape and place of each tensor of a safetensors file, and the texts of its writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= path.stat().st_size:
                raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes.")
            plain = json.loads(file.read(length))
        self._begin = 8 + length
        self.metadata: dict[str, str] | None = plain.pop("__metadata__", None)
        self.tensors: dict[str, dict[str, Any]] = plain

    def dtype(self, name: str) -> torch.dtype:
        code = self.tensors[name]["dtype"]
        if code not in _FORMATS:
            raise ValueError(f"{self._path}: the number format {code} of {name} is unknown.")
        return _FORMATS[code]

    def tensor(self, name: str, make: Make) -> torch.Tensor:
        """Fake, or the few whole numbers that it has."""
        dtype, shape = self.dtype(name), self.tensors[name]["shape"]
        begin, end = self.tensors[name]["data_offsets"]
        is_whole = not dtype.is_floating_point and not dtype.is_complex
        if not is_whole or not 0 < end - begin <= _READ_BYTES:
            return make(shape, dtype)
        with self._path.open("rb") as file:
            file.seek(self._begin + begin)
            numbers = bytearray(file.read(end - begin))
        return torch.frombuffer(numbers, dtype=dtype).reshape(shape)


class _Slice:
    """A tensor of a file that is not read yet, as `safe_open(...).get_slice` returns it."""

    def __init__(self, header: Header, name: str, make: Make) -> None:
        self._header, self._name, self._make = header, name, make

    def get_shape(self) -> list[int]:
        return list(self._header.tensors[self._name]["shape"])

    def get_dtype(self) -> str:
        return str(self._header.tensors[self._name]["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._header.tensor(self._name, self._make)[index]


class _OpenFile:
    """What replaces `safetensors.safe_open`."""

    def __init__(self, header: Header, device: Any, make: Make) -> None:
        self._header, self._device, self._make = header, device, make

    def __enter__(self) -> "_OpenFile":
        return self

    def __exit__(self, *error: object) -> None: ...

    def keys(self) -> list[str]:
        return list(self._header.tensors)

    def offset_keys(self) -> list[str]:
        return sorted(self._header.tensors, key=lambda name: self._header.tensors[name]["data_offsets"][0])

    def metadata(self) -> dict[str, str] | None:
        return self._header.metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        made = self._header.tensor(name, self._make)
        return made if str(self._device) == "cpu" else made.to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._header, name, self._make)


def saves_none(folder: str | os.PathLike[str]) -> None:
    """Notes that no model is saved into a folder. Returns no folder that takes it instead."""
    _unsaved.add(os.path.abspath(folder))  # noqa: PTH100 - of whatever the program calls a path


def _is_unsaved(folder: Any, *files: str) -> bool:
    # Whether the program would have saved a model in a folder, which has none of some files.
    if not isinstance(folder, (str, os.PathLike)) or os.path.abspath(folder) not in _unsaved:  # noqa: PTH100
        return False
    return not any(Path(folder, name).exists() for name in files)


def _is_for_a_tokenizer() -> bool:
    # Whether a tokenizer asks. It looks for the model's configuration, and goes on without one.
    files = (Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_stack(None))
    return any(name.startswith("tokenization_") for name in files)


# What replaces the functions that read and write files.


def _safe_open(
    mode: FakeTensors, original: Any, filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any
) -> Any:
    if framework not in ("pt", "torch", "pytorch"):
        return original(filename, framework, device, **kwargs)
    return _OpenFile(Header(Path(filename)), device, mode.empty_on_host)


def _load_file(mode: FakeTensors, original: Any, filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
    if is_saved(filename):
        return load_saved(filename, device)
    return _OpenFile(Header(Path(filename)), device, mode.empty_on_host).get_tensors()


def _cached_file(
    mode: FakeTensors, original: Any, path_or_repo_id: Any, filename: Any, *args: Any, **kwargs: Any
) -> Any:
    if filename == _OF_MODEL and _is_unsaved(path_or_repo_id, filename) and not _is_for_a_tokenizer():
        _end(mode, path_or_repo_id)
    return original(path_or_repo_id, filename, *args, **kwargs)


def _from_pretrained(original: Any, mode: FakeTensors) -> Any:
    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """The folder may have a configuration, and no weights."""
        if _is_unsaved(pretrained_model_name_or_path, *_OF_WEIGHTS):
            _end(mode, pretrained_model_name_or_path)
        return original.__func__(cls, pretrained_model_name_or_path, *args, **kwargs)

    return classmethod(from_pretrained)


def _end(mode: FakeTensors, folder: Any) -> None:
    # Transformers replaces each error by one of its own.
    mode.ends_with(
        CannotForeseeError(
            f"The program loads the model that it has saved in {folder}, and a foreseen run has no weights to "
            f"save, at {place_in_program()}."
        )
    )


def _load(mode: FakeTensors, original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    if is_saved(f):
        return load_saved(f, map_location)

    def as_it_is() -> Any:
        return load_real(lambda: original(f, map_location, *args, **kwargs))

    is_path = isinstance(f, (str, os.PathLike))
    if not is_path or Path(f).stat().st_size < _SMALL_PICKLE_BYTES or str(map_location) == "meta":
        return as_it_is()
    try:
        with mode.fakes:
            loaded = original(f, "cpu", *args, **{**kwargs, "mmap": None})
    except (NotImplementedError, RuntimeError, pickle.UnpicklingError):
        return as_it_is()  # an older format, or one that torch refuses anyway
    if not _are_weights(loaded):
        return as_it_is()

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        anew = mode.empty_on_host(tensor.shape, tensor.dtype)
        is_there = lands_on_device(str(tensor.device), map_location)
        return anew.to(pretended_device.device()) if is_there else anew

    return with_tensors(loaded, made)


def _are_weights(loaded: Any) -> bool:
    if not isinstance(loaded, Mapping):
        return False
    tensors = list(tensors_in(loaded))
    fractions = sum(each.nbytes for each in tensors if each.dtype.is_floating_point)
    return fractions > 0.5 * sum(each.nbytes for each in tensors) and all(isinstance(name, str) for name in loaded)


_HEADER = "Weights come from the file's header."
_KEPT = "Fake tensors stay in this process."
_UNSAVED = "A model that the program has saved has no weights."
PATCHES: Table = (
    Change(
        "os",
        "HF_DEACTIVATE_ASYNC_LOAD",
        "Else transformers copies weights in threads, which no mode of this thread follows.",
        lambda module, mode: os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1"),
    ),
    Patch("safetensors", "safe_open", _HEADER, with_given(_safe_open)),
    Patch("transformers.utils.hub", "cached_file", _UNSAVED, with_given(_cached_file)),
    Patch("transformers.modeling_utils", "PreTrainedModel.from_pretrained", _UNSAVED, _from_pretrained),
    Patch("safetensors.torch", "load_file", _HEADER, with_given(_load_file)),
    # The second name is the one of transformers.
    Patch("safetensors.torch", "save_file", _KEPT, around(keep_fakes), aliases="safe_save_file"),
    Patch("safetensors.torch", "save_model", _KEPT, around(keep_fakes)),
    Change(
        "torch.serialization",
        "register_package",
        "Torch's table of devices has the pretended one. Torch's own rows begin with 10.",
        lambda module, mode: _register_device(),
    ),
    Patch(
        "torch", "_utils._rebuild_tensor", "It makes tensors of the storages of the device.", around(_rebuild_tensor)
    ),
    Patch(
        "torch.random",
        "set_rng_state",
        "A state of the device's is no part of a foreseen run.",
        around(_set_rng_state),
    ),
    Patch("torch", "load", _HEADER, with_given(_load)),
    Patch("torch", "save", _KEPT, around(keep_fakes)),
)
