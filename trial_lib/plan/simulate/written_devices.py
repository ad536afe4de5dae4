"""Devices as programs write them, in a foreseen run: `"cuda"` is the pretended device.

A program writes `"cuda"`, calls `model.cuda()` and asks `torch.cuda` whether there is a GPU and how much memory it has.
Each gets the answer of the pretended device. When an operator makes a tensor, the mode of the run reads the device
(`pretended_device.as_written`). This module has the functions that would fail before.
"""

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._device import DeviceContext, _device_constructors

from trial_lib.plan.simulate import fused_kernels, known_numbers, pretended_device
from trial_lib.plan.simulate.fake_tensors import FakeTensors
from trial_lib.plan.simulate.logs import MemoryLog
from trial_lib.rank.patching import stand_in, stand_in_for_scripts

_WRITTEN = frozenset((str, torch.device))


def install(fake: FakeTensors, memory: MemoryLog) -> None:
    """Makes what programs write about devices mean the pretended one. Call it once, before the program runs."""
    # Else torch runs the backward pass of the device in a thread of its own, in which no mode of this one counts.
    torch._C._set_multithreading_enabled(False)
    fused_kernels.install_attention_kernels()
    _replace_methods(memory)
    _read_devices_of_data()
    _read_devices_of_generators()
    _read_devices_of_autocast()
    FakeTensor.is_cuda = property(lambda tensor: tensor.device.type == pretended_device.NAME)  # type: ignore[assignment]
    _set_data_between_places(fake)
    torch.utils.swap_tensors = move_into
    # A copy of a fake tensor, as of a layer that a model repeats, belongs to the same mode.
    FakeTensorMode.__deepcopy__ = lambda mode, memo: mode  # type: ignore[attr-defined]


def _replace_methods(memory: MemoryLog) -> None:
    # Replaces methods that threads call as well, such as the one of a `DataLoader` that pins batches.

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """Batches stay as they are: they are real, and small."""
        if not isinstance(tensor, FakeTensor) or memory.is_pinned(tensor):
            return tensor
        copied = tensor.clone(memory_format=torch.contiguous_format)
        memory.pinned(copied)
        return copied

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        return isinstance(tensor, FakeTensor) and memory.is_pinned(tensor)

    def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        return tensor.to(pretended_device.device(), non_blocking=non_blocking)

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        """Replaces `Tensor.record_stream`: nothing is pending."""

    for method in (pin_memory, is_pinned, cuda, record_stream):
        setattr(torch.Tensor, method.__name__, method)
    # The mode sees a copy alone. `to` compares devices before it copies, and `new_tensor` looks for its device.
    for name in ("to", "new_tensor"):
        setattr(torch.Tensor, name, _reading(getattr(torch.Tensor, name)))
    # By its functions, a parameter without a shape knows what it may do (torch.nn.LazyLinear).
    kinds: Any = torch.nn.parameter
    kinds.UninitializedTensorMixin._allowed_methods.extend((torch.Tensor.to, torch.Tensor.cuda))


def own_device(device: Any) -> Any:
    """The pretended device for one of CUDA, and anything else as it is."""
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
    for name in ("tensor", "as_tensor", "asarray"):
        original = getattr(torch, name)
        reading = _reading(original)
        stand_in_for_scripts(name, original, reading)
        # DeepSpeed's own copy (deepspeed/runtime/zero/partition_parameters.py).
        stand_in(f"_orig_torch_{name}", original, reading)
    enter: Any = DeviceContext.__init__

    def init(context: DeviceContext, device: Any) -> None:
        enter(context, own_device(device))

    DeviceContext.__init__ = init  # type: ignore[method-assign, assignment]


def _reading(original: Any) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not _WRITTEN.isdisjoint(map(type, args)):
            args = tuple(map(own_device, args))
        if "device" in kwargs:
            kwargs["device"] = own_device(kwargs["device"])
        # Data stays as it is: it is real, and small.
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return function


def _read_devices_of_generators() -> None:
    # Replaces `torch.Generator` by one of the host. Its numbers are no part of a foreseen run.
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


def _read_devices_of_autocast() -> None:
    # Lets `torch.autocast("cuda")` cast on the pretended device, and questions about it have that answer.
    modes = torch.amp.autocast_mode
    enter, cast = torch.autocast.__init__, modes._cast

    def init(context: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(context, own_device(device_type), *args, **kwargs)

    def cast_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, own_device(device_type), dtype)

    torch.autocast.__init__ = init  # type: ignore[method-assign, assignment]
    modes._cast = cast_to
    # Where no device is given, torch means CUDA.
    for name in ("is_autocast_available", "is_autocast_enabled", "get_autocast_dtype"):
        original = getattr(torch, name, None) or getattr(modes, name)
        stand_in(name, original, _of_own_device(original))
    for name in ("set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _of_own_device(getattr(torch, name)))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype(pretended_device.NAME)
    torch.set_autocast_gpu_dtype = lambda dtype: torch.set_autocast_dtype(pretended_device.NAME, dtype)
    torch.set_autocast_dtype(pretended_device.NAME, torch.float16)


def _of_own_device(original: Any) -> Any:
    def function(*args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            device_type, args = args[0], args[1:]
        return original(own_device(device_type or "cuda"), *args, **kwargs)

    return function


def _set_data_between_places(fake: FakeTensors) -> None:
    # Lets `tensor.data = other` go from one place to another. Torch refuses that for a device of another maker.
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
    replaces it while a run is foreseen. `moved` has the same `requires_grad`, and is of no use afterwards.
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
