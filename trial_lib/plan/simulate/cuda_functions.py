"""What programs take from `torch.cuda` and `torch.accelerator` in a foreseen run: the pretended device answers."""

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ReduceOp

from trial_lib.messages.foreseen_run import BFLOAT16_SINCE
from trial_lib.plan.simulate import pretended_device
from trial_lib.plan.simulate.asks import Asks
from trial_lib.plan.simulate.known_numbers import known_numbers, used
from trial_lib.plan.simulate.logs import MemoryLog
from trial_lib.rank.patching import stand_in, when_imported

# A data-centre GPU as programs see it.
_PROCESSORS = 132
_NCCL = (2, 27, 3)
_CUDA = "12.8"
_ALIGNED_BYTES = 512
# Where an address space of a device may begin. No address of the host is as large.
_FIRST = 2**52
_ADDRESS = "_foreseen_address"
# Old types of tensors, by which Megatron's code makes some. Torch has them only where it is built for CUDA.
_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
_DO_NOTHING = (
    "set_device set_stream synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all "
    "set_rng_state set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats _record_memory_history _dump_snapshot set_sync_debug_mode "
    "set_per_process_memory_fraction init _lazy_init _sleep"
)


class AskedDevice(NamedTuple):
    """The device as programs see it."""

    name: str  # as CUDA has it
    memory: int  # bytes
    capability: float  # its compute capability, such as 8.6

    @property
    def version(self) -> tuple[int, int]:
        major, _, minor = f"{self.capability:.1f}".partition(".")
        return int(major), int(minor)


def install(memory: MemoryLog, device: AskedDevice, devices: int) -> None:
    """Replaces the functions, under each module that has them."""
    _give_addresses()
    for name, answer in _answers(memory, device, devices).items():
        for module in _modules():
            if hasattr(module, name):
                setattr(module, name, answer)
    _answer_for_the_core(devices)
    torch.cuda.Stream = torch.cuda.Event = pretended_device.Stream  # type: ignore[assignment, misc]
    torch.cuda.nccl.version = lambda: _NCCL
    # The Trainer's `tf32`, for one, looks at it.
    torch.version.cuda = _CUDA
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, _always(0))
    for name in ("start", "stop"):
        setattr(torch.cuda.profiler, name, _always(None))
    _replace_types()


def _answer_for_the_core(devices: int) -> None:
    """Gives torch's core the functions that it has where it is built for CUDA. Packages bind them, or call them.

    Those that this table lacks do nothing.
    """
    core: Any = torch._C
    answers = {
        "_cuda_getCurrentRawStream": 0,
        "_cuda_getDeviceCount": devices,
        "_cuda_getDevice": 0,
        "_cuda_canDeviceAccessPeer": True,
        "_cuda_getCurrentBlasHandle": 0,
        "_cuda_getCurrentSolverHandle": 0,
    }

    def missing(name: str) -> Any:
        if name.startswith("_cuda_"):
            return _always(answers.get(name))
        raise AttributeError(f"module 'torch._C' has no attribute '{name}'")

    core.__getattr__ = missing


def _modules() -> Iterator[ModuleType]:
    yield from (torch.cuda, torch.cuda.memory, torch.cuda.random)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:  # since torch 2.6
        yield accelerator
        if isinstance(getattr(accelerator, "memory", None), ModuleType):
            yield accelerator.memory


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _answers(memory: MemoryLog, found: AskedDevice, devices: int) -> dict[str, Any]:
    # Functions of `torch.cuda`, by name. Dynamo keeps a table of them, so each is an object of its own.
    device_bytes, has_bfloat16 = found.memory, found.capability >= BFLOAT16_SINCE
    answers: dict[str, Any] = {
        "is_available": _always(True),
        "is_initialized": _always(True),
        "device_count": _always(devices),
        "current_device": _always(0),
        # Torch counts what an older device emulates, unless it is told not to.
        "is_bf16_supported": lambda including_emulation=True: including_emulation or has_bfloat16,
        "get_device_name": _always(found.name),
        "get_device_capability": _always(found.version),
        "get_device_properties": _always(_Properties(found)),
        "mem_get_info": lambda device=None: (device_bytes - memory.live_bytes, device_bytes),
        "get_memory_info": lambda device=None: (device_bytes - memory.live_bytes, device_bytes),
        "memory_stats": lambda device=None: _Stats(
            {
                "allocated_bytes.all.current": memory.live_bytes,
                "allocated_bytes.all.peak": memory.peak_bytes,
                "reserved_bytes.all.current": memory.live_bytes,
                "reserved_bytes.all.peak": memory.peak_bytes,
            }
        ),
        "memory_summary": lambda device=None, abbreviated=False: f"{memory.live_bytes:,} bytes allocated (foreseen)",
        "memory_snapshot": _always([]),
        "memory_stats_as_nested_dict": _always({}),
        "host_memory_stats": lambda: _Stats(),
        "host_memory_stats_as_nested_dict": _always({}),
        "get_per_process_memory_fraction": _always(1.0),
        "get_allocator_backend": _always("native"),
        "is_current_stream_capturing": _always(False),
        "get_sync_debug_mode": _always(0),
        "_snapshot": _always({"segments": [], "device_traces": []}),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": lambda: torch.initial_seed(),
        "_is_in_bad_fork": _always(False),
        "can_device_access_peer": _always(True),
        "get_arch_list": lambda: ["sm_{}{}".format(*found.version)],
        "get_gencode_flags": _always(""),
        "is_tf32_supported": lambda: has_bfloat16,
        "device_memory_used": lambda device=None: memory.live_bytes,
        "current_blas_handle": _always(0),
        "current_solver_handle": _always(0),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "device_of": contextlib.nullcontext,
    }
    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        answers[name] = lambda device=None: memory.live_bytes
        answers[f"max_{name}"] = lambda device=None: memory.peak_bytes
    for name in ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"):
        answers[name] = _always(0)
    for name in ("current_stream", "default_stream"):
        answers[name] = lambda device=None: pretended_device.Stream()
    for name in _DO_NOTHING.split():
        answers[name] = _always(None)
    return answers


class _Stats(dict[str, int]):
    """What `torch.cuda.memory_stats` returns. No figure is missing."""

    def __missing__(self, name: str) -> int:
        return 0


class _Properties:
    """What `torch.cuda.get_device_properties` returns."""

    multi_processor_count = _PROCESSORS
    warp_size = 32
    gcnArchName = ""  # noqa: N815 - torch's name
    is_integrated = False
    uuid = "00000000-0000-0000-0000-000000000000"
    L2_cache_size = 50 * 2**20
    max_threads_per_multi_processor = 2048
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_multiprocessor = 228 * 2**10

    def __init__(self, device: AskedDevice) -> None:
        self.name, self.total_memory = device.name, device.memory
        self.major, self.minor = device.version


def _replace_types() -> None:
    # Replaces the old types, and `Tensor.type`, which has their names.
    made = {name: _type_of(name, dtype) for name, dtype in _TYPES.items()}
    for name, kind in made.items():
        setattr(torch.cuda, name, kind)
    named = {f"torch.cuda.{name}": dtype for name, dtype in _TYPES.items()}
    names = {dtype: name for name, dtype in named.items()}
    original: Any = torch.Tensor.type

    def type_(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_on_device = tensor.device.type == pretended_device.NAME
        if dtype is None and is_on_device and tensor.dtype in names:
            return names[tensor.dtype]
        wanted = (
            named.get(dtype)
            if isinstance(dtype, str)
            else next((kind.dtype for kind in made.values() if kind is dtype), None)
        )
        if wanted is not None:
            return tensor.to(pretended_device.device(), wanted)
        return original(tensor, *(() if dtype is None else (dtype,)), *args, **kwargs)

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _type_of(name: str, number_format: torch.dtype) -> Any:
    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            is_tensor = isinstance(instance, torch.Tensor) and instance.device.type == pretended_device.NAME
            return is_tensor and instance.dtype == number_format

    class Legacy(metaclass=Kind):
        dtype = number_format

        def __new__(cls, *numbers: Any) -> Any:
            # Numbers are sizes, and one sequence has the values.
            if len(numbers) == 1 and not isinstance(numbers[0], int) and not isinstance(numbers[0], torch.Size):
                return torch.tensor(numbers[0], dtype=number_format, device=pretended_device.NAME)
            sizes = numbers[0] if numbers and isinstance(numbers[0], torch.Size) else numbers or (0,)
            return torch.empty(sizes, dtype=number_format, device=pretended_device.NAME)

    Legacy.__name__ = Legacy.__qualname__ = name
    return Legacy


class Addresses:
    """Addresses of fake tensors, by which programs tell tensors apart (`parameter.data_ptr() in seen`).

    A fake tensor has no memory, so torch says 0 for each. Here each storage gets a range of its own in a space that
    nobody reads. As on a device, it begins at a multiple of 512 bytes, and what is empty has the address 0.
    """

    def __init__(self) -> None:
        self._next = _FIRST

    def of(self, storage: torch.UntypedStorage) -> int:
        """One that has grown gets another."""
        size = storage.nbytes()
        if not size:
            return 0
        address, room = getattr(storage, _ADDRESS, (0, -1))
        if size > room:
            address, room = self._next, size
            setattr(storage, _ADDRESS, (address, room))
            self._next += -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return int(address)


def _give_addresses() -> None:
    # Replaces `data_ptr` of fake tensors and of storages.
    addresses = Addresses()
    original: Any = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> Any:
        return addresses.of(storage) if storage.device.type == "meta" else original(storage)

    def of_tensor(tensor: torch.Tensor) -> int:
        if not tensor.numel():
            return 0
        return addresses.of(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    torch.UntypedStorage.data_ptr = of_storage  # type: ignore[method-assign, assignment]
    FakeTensor.data_ptr = of_tensor  # type: ignore[method-assign, assignment]


# What libraries and programs ask of a computer, in a foreseen run: the CPU or CUDA, arrays, objects of other ranks.


def install_asked_of_computers(asks: Asks) -> None:
    """Replaces the functions. Call it once, before the program runs."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    when_imported("transformers.training_args", _in_the_trainer)
    when_imported("accelerate.state", _in_accelerate)
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        when_imported(f"{package}.accelerators.cuda", _in_lightning)
    _replace_numpy(asks)
    _replace_object_collectives()
    _sum_over_ranks()
    when_imported("accelerate.utils.random", _keep_random_states)


def _replace_numpy(asks: Asks) -> None:
    original = torch.Tensor.numpy

    def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, force=force)
        known = known_numbers(tensor)
        used(known)
        if known is None:
            value = asks.answer("numpy", tensor.dtype)
            known = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
        return original(known.detach(), force=force)

    torch.Tensor.numpy = numpy  # type: ignore[method-assign, assignment]


def _replace_object_collectives() -> None:
    # Replaces collectives that pickle objects. A fake tensor cannot be pickled.

    def broadcast_object_list(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        """Rank 0 is the only source."""

    def all_gather_object(object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if scatter_object_input_list:
            scatter_object_output_list[0] = scatter_object_input_list[0]

    for function in (broadcast_object_list, all_gather_object, gather_object, scatter_object_list):
        stand_in(function.__name__, getattr(torch.distributed, function.__name__), function)


def _sum_over_ranks() -> None:
    # Gives a sum over all ranks that many times the number of rank 0, as if every rank had the same.
    original = torch.distributed.all_reduce
    is_inside = False

    def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        nonlocal is_inside
        if is_inside:
            # A default device is a mode of Python's calls, so the original calls the function of this name once more.
            return original(tensor, op, group, async_op)
        is_inside = True
        try:
            work = original(tensor, op, group, async_op)
        finally:
            is_inside = False
        numbers = known_numbers(tensor) if isinstance(tensor, FakeTensor) else tensor
        if numbers is not None and op == ReduceOp.SUM and numbers.dtype != torch.bool:
            numbers.detach().mul_(torch.distributed.get_world_size(group))
        return work

    stand_in("all_reduce", original, all_reduce)


def _keep_random_states(module: ModuleType) -> None:
    original: Any = module.synchronize_rng_states

    @functools.wraps(original)
    def synchronize_rng_states(*args: Any, **kwargs: Any) -> None:
        """All ranks have the states of rank 0."""

    stand_in("synchronize_rng_states", original, synchronize_rng_states)


def _in_the_trainer(module: ModuleType) -> None:
    arguments_class: Any = module.TrainingArguments
    original = arguments_class.__post_init__

    @functools.wraps(original)
    def check(arguments: Any) -> None:
        for name in ("use_cpu", "no_cuda"):
            if getattr(arguments, name, False):
                setattr(arguments, name, False)
        original(arguments)

    arguments_class.__post_init__ = check


def _in_accelerate(module: ModuleType) -> None:
    state_class: Any = module.PartialState
    original = state_class.__init__

    @functools.wraps(original)
    def init(state: Any, cpu: bool = False, **kwargs: Any) -> None:
        original(state, cpu=False, **kwargs)

    state_class.__init__ = init


def _in_lightning(module: ModuleType) -> None:
    # It would refuse a device of another name, and set up kernels.
    module.CUDAAccelerator.setup_device = lambda accelerator, device: None
