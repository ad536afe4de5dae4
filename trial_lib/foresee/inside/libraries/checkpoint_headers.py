"""Checkpoints of a foreseen run: weights come from a file's header, so that no model is read from a disk.

`from_pretrained` of a local checkpoint opens safetensors files, or pickles with `torch.load`. Both have the shape and
the number format of each tensor before its numbers. A small tensor of whole numbers is read as it is, because code may
look at it. The format: https://github.com/huggingface/safetensors (a length of 8 bytes, then JSON).
"""

import functools
import json
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trial_lib.foresee.inside import pretended_device
from trial_lib.foresee.inside.asks import CannotForeseeError
from trial_lib.foresee.inside.libraries.saved_tensors import (
    is_saved,
    keeping,
    lands_on_device,
    load_real,
    load_saved,
    with_tensors,
)
from trial_lib.foresee.inside.program_lines import place_in_program
from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in

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
    """The header of a safetensors file.

    Args:
        path: of the file.

    Attributes:
        tensors: number format, shape and place of each tensor, by name.
        metadata: texts that the file's writer has left.

    Raises:
        ValueError: the file has no such header.
    """

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
        """Returns the number format of a tensor.

        Raises:
            ValueError: this torch has no such format.
        """
        code = self.tensors[name]["dtype"]
        if code not in _FORMATS:
            raise ValueError(f"{self._path}: the number format {code} of {name} is unknown.")
        return _FORMATS[code]

    def tensor(self, name: str, make: Make) -> torch.Tensor:
        """Returns a tensor: fake, or the few whole numbers that it has."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

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
    """Returns whether the program would have saved a model in a folder, which has none of some files."""
    if not isinstance(folder, (str, os.PathLike)) or os.path.abspath(folder) not in _unsaved:  # noqa: PTH100
        return False
    return not any(Path(folder, name).exists() for name in files)


def _is_for_a_tokenizer() -> bool:
    """Returns whether a tokenizer asks. It looks for the model's configuration, and goes on without one."""
    files = (Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_stack(None))
    return any(name.startswith("tokenization_") for name in files)


def install(make: Make, fakes: FakeTensorMode, ends_with: Callable[[BaseException], None]) -> None:
    """Makes programs load headers. Call it before the user's program runs.

    Args:
        make: makes the tensors.
        fakes: the mode of fake tensors.
        ends_with: ends the run with an error.
    """
    # Else transformers copies weights in threads, which no mode of this thread follows.
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")

    def in_safetensors(module: ModuleType) -> None:
        original = module.safe_open

        def safe_open(filename: Any, framework: str = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
            """Replaces `safetensors.safe_open`."""
            if framework not in ("pt", "torch", "pytorch"):
                return original(filename, framework, device, **kwargs)
            return _OpenFile(Header(Path(filename)), device, make)

        stand_in("safe_open", original, safe_open)

    def in_torch_files(module: ModuleType) -> None:
        original = module.load_file

        def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> dict[str, torch.Tensor]:
            """Replaces `safetensors.torch.load_file`."""
            if is_saved(filename):
                return load_saved(filename, device)  # type: ignore[no-any-return]
            return _OpenFile(Header(Path(filename)), device, make).get_tensors()

        stand_in("load_file", original, load_file)
        for name, alias in (("save_file", "safe_save_file"), ("save_model", "save_model")):
            saves = getattr(module, name)
            # The second name is the one of transformers.
            for each in (alias, name):
                stand_in(each, saves, keeping(saves))

    def in_transformers(module: ModuleType) -> None:
        original = module.cached_file

        def cached_file(path_or_repo_id: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            """Replaces `transformers.utils.hub.cached_file`, which asks the hub for what is not here."""
            if filename == _OF_MODEL and _is_unsaved(path_or_repo_id, filename) and not _is_for_a_tokenizer():
                end(path_or_repo_id)
            return original(path_or_repo_id, filename, *args, **kwargs)

        stand_in("cached_file", original, cached_file)

    def in_models(module: ModuleType) -> None:
        original = module.PreTrainedModel.from_pretrained.__func__

        @functools.wraps(original)
        def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
            """Replaces `PreTrainedModel.from_pretrained`. The folder may have a configuration, and no weights."""
            if _is_unsaved(pretrained_model_name_or_path, *_OF_WEIGHTS):
                end(pretrained_model_name_or_path)
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)

        module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)

    def end(folder: Any) -> None:
        # Transformers replaces each error by one of its own.
        ends_with(
            CannotForeseeError(
                f"The program loads the model that it has saved in {folder}, and a foreseen run has no weights to "
                f"save, at {place_in_program()}."
            )
        )

    when_imported("safetensors", in_safetensors)
    when_imported("transformers.utils.hub", in_transformers)
    when_imported("transformers.modeling_utils", in_models)
    when_imported("safetensors.torch", in_torch_files)
    _replace_torch_load(make, fakes)


def _replace_torch_load(make: Make, fakes: FakeTensorMode) -> None:
    original = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.load`."""
        if is_saved(f):
            return load_saved(f, map_location)

        def as_it_is() -> Any:
            return load_real(lambda: original(f, map_location, *args, **kwargs))

        is_path = isinstance(f, (str, os.PathLike))
        if not is_path or Path(f).stat().st_size < _SMALL_PICKLE_BYTES or str(map_location) == "meta":
            return as_it_is()
        try:
            with fakes:
                loaded = original(f, "cpu", *args, **{**kwargs, "mmap": None})
        except (NotImplementedError, RuntimeError, pickle.UnpicklingError):
            return as_it_is()  # an older format, or one that torch refuses anyway
        if not _are_weights(loaded):
            return as_it_is()

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, FakeTensor):
                return tensor
            anew = make(tensor.shape, tensor.dtype)
            is_there = lands_on_device(str(tensor.device), map_location)
            return anew.to(pretended_device.device()) if is_there else anew

        return with_tensors(loaded, made)

    stand_in("load", original, load)
    stand_in("save", torch.save, keeping(torch.save))


def _are_weights(loaded: Any) -> bool:
    """Returns whether a pickle has the state of a model, or more than one: names with numbers that have fractions."""
    if not isinstance(loaded, Mapping):
        return False
    tensors = list(_tensors(loaded))
    fractions = sum(each.nbytes for each in tensors if each.dtype.is_floating_point)
    return fractions > 0.5 * sum(each.nbytes for each in tensors) and all(isinstance(name, str) for name in loaded)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
