"""The pretended device: torch's slot for foreign devices, and DeepSpeed's accelerator for it."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "foreseen"
"""The type of the device, as `tensor.device.type` shows it."""


class Stream:
    """A stream or an event of the pretended device. Its work is done at once."""

    cuda_stream = stream_id = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def device(self) -> torch.device:
        return device()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        """Selects the one before."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds between two events."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else Stream()

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = wait_event = wait_stream = _does_nothing


class _Module:
    """What torch looks for in a device's module. A program finds `torch.cuda` in its place, so that has the rest."""

    Stream = Event = Stream

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> Any:
        return Stream()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    def _does_nothing(self, *args: Any, **kwargs: Any) -> None: ...

    set_device = synchronize = empty_cache = manual_seed_all = manual_seed = set_rng_state = _does_nothing

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield


def install() -> None:
    """Makes the device known to torch. Call it once for a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # `torch.tensor(..., device=...)` then makes a tensor of the host, and moves it where a mode sees it.
    torch._C._set_only_lift_cpu_tensors(True)

    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]


@functools.cache
def device() -> torch.device:
    """The device of this rank."""
    return torch.device(NAME, 0)


def as_written(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The arguments of an operator that makes tensors, as a program means them, and whether the result is page-locked.

    They have this device for one of CUDA, and no `pin_memory`.
    """
    read = dict(kwargs)
    is_pinned = bool(read.pop("pin_memory", False))
    where = read.get("device")
    if where is not None and where.type == "cuda":
        read["device"] = device()
    return read, is_pinned
