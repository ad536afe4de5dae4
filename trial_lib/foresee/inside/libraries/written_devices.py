"""Devices as programs write them, in a foreseen run: `"cuda"` is the pretended device.

A program writes `"cuda"`, calls `model.cuda()` and asks `torch.cuda` whether there is a GPU and how much memory it has.
Each gets the answer of the pretended device. When an operator makes a tensor, the mode of the run reads the device
(`pretended_device.as_written`). This module has the functions that would fail before.
"""

import contextlib
import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import DeviceContext, _device_constructors

from trial_lib.foresee.inside import known_numbers, pretended_device
from trial_lib.foresee.inside.fake_tensors import FakeTensors
from trial_lib.foresee.inside.libraries import attention_kernels
from trial_lib.foresee.inside.memory_log import MemoryLog
from trial_lib.intercept.stand_in import stand_in

_WRITTEN = frozenset((str, torch.device))
# A data-centre GPU as programs see it. Some choose number formats and kernels by it.
_CAPABILITY = (9, 0)
_PROCESSORS = 132


def install(fake: FakeTensors, memory: MemoryLog, device_bytes: int, devices: int) -> None:
    """Makes what programs write about devices mean the pretended one. Call it once, before the program runs.

    Args:
        fake: the mode of the run.
        memory: the log, which answers questions about memory.
        device_bytes: memory of the device.
        devices: on a host.
    """
    # Else torch runs the backward pass of the device in a thread of its own, in which no mode of this one counts.
    torch._C._set_multithreading_enabled(False)
    attention_kernels.install()
    _replace_methods(memory)
    _read_devices_of_data()
    _read_devices_of_generators()
    _set_data_between_places(fake)
    torch.utils.swap_tensors = move_into
    # A copy of a fake tensor, as of a layer that a model repeats, belongs to the same mode.
    FakeTensorMode.__deepcopy__ = lambda mode, memo: mode  # type: ignore[attr-defined]
    answers = _answers(memory, device_bytes, devices)
    for name, answer in answers.items():
        if hasattr(torch.cuda, name):
            setattr(torch.cuda, name, answer)
    # Bound when a package is imported that has kernels of its own, such as bitsandbytes.
    setattr(torch._C, "_cuda_getCurrentRawStream", lambda device=0: 0)  # noqa: B010 - torch declares it for CUDA
    torch.cuda.Stream = torch.cuda.Event = pretended_device.Stream  # type: ignore[assignment, misc]
    for name in ("is_autocast_available", "is_autocast_enabled"):
        _with_own_device(torch.amp if hasattr(torch.amp, name) else torch, name)


def _answers(memory: MemoryLog, device_bytes: int, devices: int) -> dict[str, Any]:
    """Returns functions of `torch.cuda`, by name. Dynamo keeps a table of them, so each is an object of its own."""

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    stats = {"num_alloc_retries": 0, "num_ooms": 0}
    answers: dict[str, Any] = {
        "is_available": always(True),
        "is_initialized": always(True),
        "device_count": always(devices),
        "current_device": always(0),
        "is_bf16_supported": always(True),
        "get_device_name": always("Foreseen device"),
        "get_device_capability": always(_CAPABILITY),
        "get_device_properties": always(_Properties(device_bytes)),
        "mem_get_info": lambda device=None: (device_bytes - memory.live_bytes, device_bytes),
        "memory_stats": lambda device=None: {
            **stats,
            "allocated_bytes.all.current": memory.live_bytes,
            "allocated_bytes.all.peak": memory.peak_bytes,
        },
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": lambda: torch.initial_seed(),
        "_is_in_bad_fork": always(False),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
    }
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers[name] = lambda device=None: memory.live_bytes
        answers[f"max_{name}"] = lambda device=None: memory.peak_bytes
    for name in ("current_stream", "default_stream"):
        answers[name] = lambda device=None: pretended_device.Stream()
    for name in (
        "set_device",
        "set_stream",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_rng_state",
        "set_rng_state_all",
        "reset_peak_memory_stats",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "set_per_process_memory_fraction",
        "init",
        "_lazy_init",
    ):
        answers[name] = always(None)
    return answers


class _Properties:
    """What `torch.cuda.get_device_properties` returns."""

    name = "Foreseen device"
    major, minor = _CAPABILITY
    multi_processor_count = _PROCESSORS
    warp_size = 32
    gcnArchName = ""  # noqa: N815 - torch's name
    is_integrated = False

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory


def _replace_methods(memory: MemoryLog) -> None:
    """Replaces methods that threads call as well, such as the one of a `DataLoader` that pins batches."""

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """Replaces `Tensor.pin_memory`. Batches stay as they are: they are real, and small."""
        if not isinstance(tensor, FakeTensor) or memory.is_pinned(tensor):
            return tensor
        copied = tensor.clone(memory_format=torch.contiguous_format)
        memory.pinned(copied)
        return copied

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        """Replaces `Tensor.is_pinned`."""
        return isinstance(tensor, FakeTensor) and memory.is_pinned(tensor)

    def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        """Replaces `Tensor.cuda`."""
        return tensor.to(pretended_device.device(), non_blocking=non_blocking)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        """Replaces `Tensor.record_stream`: nothing is pending."""

    for method in (pin_memory, is_pinned, cuda, record_stream):
        setattr(torch.Tensor, method.__name__, method)
    # The mode sees a copy alone. `to` compares devices before it copies, and `new_tensor` looks for its device.
    for name in ("to", "new_tensor"):
        setattr(torch.Tensor, name, _reading(getattr(torch.Tensor, name)))


def _with_own_device(module: Any, name: str) -> None:
    original = getattr(module, name)

    def ask(device: Any = "cuda") -> Any:
        """Replaces a question about automatic mixed precision."""
        return original(_own(device))

    setattr(module, name, ask)


def _own(device: Any) -> Any:
    """Returns the pretended device for one of CUDA, and anything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return pretended_device.NAME if device == "cuda" else f"{pretended_device.NAME}:0"
    if isinstance(device, torch.device) and device.type == "cuda":
        return pretended_device.device()
    return device


def _read_devices_of_data() -> None:
    """Replaces the functions that make tensors of a program's numbers, because they look for the device themselves.

    Torch adds a default device (`with torch.device(...)`, `torch.set_default_device`) to a call of such a function only
    after that. So a default device is read when the program sets it.
    """
    # Torch's table of the functions that get a default device has to have the original ones, and is made once.
    _device_constructors()
    builtin: Any = torch.jit._builtins
    for name in ("tensor", "as_tensor", "asarray"):
        original = getattr(torch, name)
        reading = _reading(original)
        operator = builtin._find_builtin(original)
        if operator is not None:
            # A function that the program compiles by TorchScript may call it.
            builtin._register_builtin(reading, operator)
        stand_in(name, original, reading)
        # DeepSpeed's own copy (deepspeed/runtime/zero/partition_parameters.py).
        stand_in(f"_orig_torch_{name}", original, reading)
    enter: Any = DeviceContext.__init__

    def init(context: DeviceContext, device: Any) -> None:
        """Replaces `DeviceContext.__init__`."""
        enter(context, _own(device))

    DeviceContext.__init__ = init  # type: ignore[method-assign, assignment]


def _reading(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not _WRITTEN.isdisjoint(map(type, args)):
            args = tuple(map(_own, args))
        if "device" in kwargs:
            kwargs["device"] = _own(kwargs["device"])
        # Data stays as it is: it is real, and small.
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return function


def _read_devices_of_generators() -> None:
    """Replaces `torch.Generator` by one of the host. Its numbers are no part of a foreseen run."""
    original = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=Kind):
        # By these a generator is pickled.
        __module__, __qualname__ = "torch", "Generator"

        def __new__(cls, device: Any = "cpu") -> Any:
            return original()

    stand_in("Generator", original, Generator)


def _set_data_between_places(fake: FakeTensors) -> None:
    """Lets `tensor.data = other` go from one place to another. Torch refuses that for a device of another maker."""
    data: Any = torch.Tensor.data

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) == isinstance(value, FakeTensor) and tensor.device.type == value.device.type:
            data.__set__(tensor, value)
            known_numbers.take_memory(tensor, value)
            return
        made = value.detach() if isinstance(value, FakeTensor) else fake.to_fake(value.detach(), value.device)
        move_into(tensor, made.requires_grad_(tensor.requires_grad))

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]


def move_into(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Gives a tensor the memory of another one, and keeps its identity, its attributes and its hooks.

    `tensor.data = moved` does so for tensors of kernels. Torch moves the parameters of a module by
    `torch.utils.swap_tensors` if they are fake. That function refuses a parameter with a weak reference, such as the
    fake mode's own memo or DeepSpeed's table of names, and drops attributes that a library has set. This function
    replaces it while a run is foreseen.

    Args:
        tensor: the tensor that programs hold.
        moved: of the same `requires_grad`. It is of no use afterwards.
    """
    if tensor is moved:
        return
    known_numbers.take_memory(tensor, moved)
    attributes = {**vars(tensor), **vars(moved)}
    moved.__dict__, tensor.__dict__ = vars(tensor), attributes
    # A fake parameter of a library's own class stays one.
    if isinstance(tensor, FakeTensor) != isinstance(moved, FakeTensor):
        tensor.__class__, moved.__class__ = moved.__class__, tensor.__class__
    torch._C._swap_tensor_impl(tensor, moved)
