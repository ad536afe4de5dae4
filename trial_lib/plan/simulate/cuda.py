"""CUDA as programs write it, in a foreseen run: `"cuda"` is the pretended device, and `torch.cuda` answers for it.

A program writes `"cuda"`, calls `model.cuda()` and asks `torch.cuda` whether there is a GPU and how much memory it has.
Each gets the answer of the pretended device. When an operator makes a tensor, the mode of the run reads the device
(`pretended_device.as_written`). This module has the functions that would fail before.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from zerotune.trial_lib.messages.foreseen_run import BFLOAT16_SINCE, ForeseeOrder
from zerotune.trial_lib.plan.simulate import known_numbers, pretended_device
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.rank.patching import Change, Patch, Table, always, around, instead, with_given

_WRITTEN = frozenset((str, torch.device))
_ALIGNED_BYTES = 512
# Where an address space of a device may begin. No address of the host is as large.
_FIRST = 2**52
_ADDRESS = "_foreseen_address"


def own_device(device: Any) -> Any:
    """The pretended device for one of CUDA, and anything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return pretended_device.NAME if device == "cuda" else f"{pretended_device.NAME}:0"
    if isinstance(device, torch.device) and device.type == "cuda":
        return pretended_device.device()
    return device


# Tensors: where they are made and where they go.


def _pin_memory(mode: FakeTensors, original: Any, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if not isinstance(tensor, FakeTensor) or mode.memory.is_pinned(tensor):
        return tensor
    copied = tensor.clone(memory_format=torch.contiguous_format)
    mode.memory.pinned(copied)
    return copied


def _is_pinned(mode: FakeTensors, original: Any, tensor: torch.Tensor, device: Any = None) -> bool:
    return isinstance(tensor, FakeTensor) and mode.memory.is_pinned(tensor)


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return tensor.to(pretended_device.device(), non_blocking=non_blocking)


def _reading(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _WRITTEN.isdisjoint(map(type, args)):
        args = tuple(map(own_device, args))
    if "device" in kwargs:
        kwargs["device"] = own_device(kwargs["device"])
    # Data stays as it is: it is real, and small.
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


def _generator(original: Any, mode: FakeTensors) -> Any:
    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(metaclass=Kind):
        # By these a generator is pickled.
        __module__, __qualname__ = "torch", "Generator"

        def __new__(cls, device: Any = "cpu") -> Any:
            return original()

    return Generator


def _data(original: Any, mode: FakeTensors) -> Any:
    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor) == isinstance(value, FakeTensor) and tensor.device.type == value.device.type:
            original.__set__(tensor, value)
            known_numbers.take_memory(tensor, value)
            return
        made = value.detach() if isinstance(value, FakeTensor) else mode.to_fake(value.detach(), value.device)
        move_into(tensor, made.requires_grad_(tensor.requires_grad))

    return property(original.__get__, set_data)


def _on_device(mode: FakeTensors, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    tensor: torch.Tensor = original(*args, **kwargs)
    if type(tensor) is torch.Tensor and tensor.requires_grad and tensor.is_leaf and not mode.in_engine:
        move_into(tensor, mode.to_fake(tensor.detach(), pretended_device.device()).requires_grad_())
    return tensor


def _gradient_is_asked(original: Any, mode: FakeTensors) -> Any:
    return property(original.__get__, torch.Tensor.requires_grad_)  # type: ignore[arg-type]


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


_addresses = Addresses()


def _of_storage(original: Any, storage: torch.UntypedStorage) -> int:
    return _addresses.of(storage) if storage.device.type == "meta" else int(original(storage))


def _of_tensor(original: Any, tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return _addresses.of(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


_TO_DEVICE = "It compares or looks up devices before the mode sees an operator."
_OF_DATA = "Data with a gradient are on its device. Torch's engine has no stream for a gradient that leaves a device."
_LOOKS = (
    "It makes a tensor of a program's numbers, and looks for the device itself. Torch adds a default device only to "
    "what it calls after that."
)
_TENSORS: Table = (
    Change(
        "torch",
        "multithreading of the backward pass",
        "Else torch runs the backward pass of the device in a thread of its own, in which no mode of this one counts.",
        lambda module, mode: torch._C._set_multithreading_enabled(False),
    ),
    # Threads call these as well, such as the one of a `DataLoader` that pins batches.
    Patch("torch", "Tensor.pin_memory", "Batches stay as they are: they are real, and small.", with_given(_pin_memory)),
    Patch("torch", "Tensor.is_pinned", "The log of memory knows it.", with_given(_is_pinned)),
    Patch("torch", "Tensor.cuda", "It is the pretended device.", instead(_cuda)),
    Patch("torch", "Tensor.record_stream", "Nothing is pending.", always(None)),
    Patch("torch", "Tensor.to Tensor.new_tensor", _TO_DEVICE, around(_reading)),
    Patch(
        "torch",
        "nn.parameter.UninitializedTensorMixin._allowed_methods",
        "By its functions, a parameter without a shape knows what it may do (torch.nn.LazyLinear).",
        lambda original, mode: [*original, torch.Tensor.to, torch.Tensor.cuda],
    ),
    Change(
        "torch.utils._device",
        "_device_constructors",
        "Torch's table of the functions that get a default device has to have the original ones, and is made once.",
        lambda module, mode: _device_constructors(),
    ),
    # The alias is DeepSpeed's own copy (deepspeed/runtime/zero/partition_parameters.py).
    *(
        Patch("torch", each, _LOOKS, around(_reading), aliases=f"_orig_torch_{each}")
        for each in ("tensor", "as_tensor", "asarray")
    ),
    Patch(
        "torch.utils._device",
        "DeviceContext.__init__",
        "A default device is read when the program sets it (`with torch.device(...)`, `torch.set_default_device`).",
        around(lambda original, context, device: original(context, own_device(device))),
    ),
    Patch("torch", "Generator", "It is one of the host. Its numbers are no part of a foreseen run.", _generator),
    Patch(
        "torch._subclasses.fake_tensor",
        "FakeTensor.is_cuda",
        "The pretended device is CUDA to programs.",
        instead(property(lambda tensor: tensor.device.type == pretended_device.NAME)),
    ),
    Patch("torch", "Tensor.data", "Torch refuses to set it from one place to another of another maker.", _data),
    Patch("torch", "Tensor.requires_grad_ zeros ones full empty rand randn", _OF_DATA, with_given(_on_device)),
    Patch("torch", "Tensor.requires_grad", _OF_DATA, _gradient_is_asked),
    Patch(
        "torch.utils",
        "swap_tensors",
        "It refuses a parameter with a weak reference, and drops attributes.",
        instead(move_into),
    ),
    Patch("torch", "UntypedStorage.data_ptr", "Programs tell tensors apart by it.", around(_of_storage)),
    Patch(
        "torch._subclasses.fake_tensor", "FakeTensor.data_ptr", "Programs tell tensors apart by it.", around(_of_tensor)
    ),
)


# What `torch.cuda` and `torch.accelerator` answer.

# A data-centre GPU as programs see it.
_PROCESSORS = 132
_NCCL = (2, 27, 3)
_CUDA = "12.8"
_MODULES = ("cuda", "cuda.memory", "cuda.random", "accelerator", "accelerator.memory")


def _version(order: ForeseeOrder) -> tuple[int, int]:
    major, _, minor = f"{order.capability:.1f}".partition(".")
    return int(major), int(minor)


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

    def __init__(self, order: ForeseeOrder) -> None:
        self.name, self.total_memory = order.device_name, order.device_bytes
        self.major, self.minor = _version(order)


def _function(answer: Callable[..., Any]) -> Callable[[Any, FakeTensors], Any]:
    """For `Patch.make`: a function of torch's that takes a device, and answers by the run."""
    return lambda original, mode: lambda *args, **kwargs: answer(mode, *args, **kwargs)


def _of_cuda(names: str, why: str, make: Callable[[Any, FakeTensors], Any]) -> Patch:
    # Dynamo keeps a table of these functions, so each is an object of its own.
    what = " ".join(f"{module}.{name}" for name in names.split() for module in _MODULES)
    return Patch("torch", what, why, make, may_lack=True)


def _live(mode: FakeTensors, device: Any = None) -> int:
    return mode.memory.live_bytes


def _peak(mode: FakeTensors, device: Any = None) -> int:
    return mode.memory.peak_bytes


def _free_and_all(mode: FakeTensors, device: Any = None) -> tuple[int, int]:
    return mode.order.device_bytes - mode.memory.live_bytes, mode.order.device_bytes


def _memory_stats(mode: FakeTensors, device: Any = None) -> _Stats:
    return _Stats(
        {
            "allocated_bytes.all.current": mode.memory.live_bytes,
            "allocated_bytes.all.peak": mode.memory.peak_bytes,
            "reserved_bytes.all.current": mode.memory.live_bytes,
            "reserved_bytes.all.peak": mode.memory.peak_bytes,
        }
    )


def _has_bfloat16(mode: FakeTensors, including_emulation: bool = False) -> bool:
    return including_emulation or mode.order.capability >= BFLOAT16_SINCE


def _answer_for_the_core(module: Any, mode: FakeTensors) -> None:
    """Packages bind these functions, or call them. Those that this table lacks do nothing."""
    core: Any = torch._C
    answers = {
        "_cuda_getCurrentRawStream": 0,
        "_cuda_getDeviceCount": mode.order.ranks_per_host,
        "_cuda_getDevice": 0,
        "_cuda_canDeviceAccessPeer": True,
        "_cuda_getCurrentBlasHandle": 0,
        "_cuda_getCurrentSolverHandle": 0,
    }

    def missing(name: str) -> Any:
        if name.startswith("_cuda_"):
            return always(answers.get(name))(None, mode)
        raise AttributeError(f"module 'torch._C' has no attribute '{name}'")

    core.__getattr__ = missing


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


_MADE = {name: _type_of(name, dtype) for name, dtype in _TYPES.items()}


def _type(original: Any, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None and tensor.device.type == pretended_device.NAME:
        for name, number_format in _TYPES.items():
            if number_format == tensor.dtype:
                return f"torch.cuda.{name}"
    wanted = (
        _TYPES.get(dtype.removeprefix("torch.cuda."))
        if isinstance(dtype, str) and dtype.startswith("torch.cuda.")
        else next((kind.dtype for kind in _MADE.values() if kind is dtype), None)
    )
    if wanted is not None:
        return tensor.to(pretended_device.device(), wanted)
    return original(tensor, *(() if dtype is None else (dtype,)), *args, **kwargs)


_ASKED = "It is the device that the plan is for."
_LOGGED = "The log of memory knows it."
_RANDOM = "Its numbers are no part of a foreseen run."
_NO_FIGURES = "There are no figures of it."
_NOTHING = "There is nothing to do."
_CUDA_FUNCTIONS: Table = (
    _of_cuda("is_available is_initialized can_device_access_peer", "There are devices.", always(True)),
    _of_cuda("device_count", "A program sees a host.", _function(lambda mode: mode.order.ranks_per_host)),
    _of_cuda("current_device", "A rank has the first.", always(0)),
    # Torch counts what an older device emulates, unless it is told not to.
    _of_cuda(
        "is_bf16_supported",
        "The device that is asked for has it or not.",
        _function(lambda mode, including_emulation=True: _has_bfloat16(mode, including_emulation)),
    ),
    _of_cuda("is_tf32_supported", "As bfloat16.", _function(_has_bfloat16)),
    _of_cuda("get_device_name", _ASKED, _function(lambda mode, device=None: mode.order.device_name)),
    _of_cuda("get_device_capability", _ASKED, _function(lambda mode, device=None: _version(mode.order))),
    _of_cuda("get_device_properties", _ASKED, _function(lambda mode, device=None: _Properties(mode.order))),
    _of_cuda("get_arch_list", _ASKED, _function(lambda mode: ["sm_{}{}".format(*_version(mode.order))])),
    _of_cuda("mem_get_info get_memory_info", _LOGGED, _function(_free_and_all)),
    _of_cuda("memory_stats", _LOGGED, _function(_memory_stats)),
    _of_cuda("memory_allocated memory_reserved memory_cached device_memory_used", _LOGGED, _function(_live)),
    _of_cuda("max_memory_allocated max_memory_reserved max_memory_cached", _LOGGED, _function(_peak)),
    _of_cuda(
        "memory_summary",
        _LOGGED,
        _function(lambda mode, device=None, abbreviated=False: f"{_live(mode):,} bytes allocated (foreseen)"),
    ),
    _of_cuda("host_memory_stats", _NO_FIGURES, instead(_Stats)),
    _of_cuda("memory_stats_as_nested_dict host_memory_stats_as_nested_dict", _NO_FIGURES, always({})),
    _of_cuda("memory_snapshot", _NO_FIGURES, always([])),
    _of_cuda("_snapshot", _NO_FIGURES, always({"segments": [], "device_traces": []})),
    _of_cuda("utilization memory_usage temperature power_draw clock_rate", _NO_FIGURES, always(0)),
    _of_cuda("get_per_process_memory_fraction", "All of it.", always(1.0)),
    _of_cuda("get_allocator_backend", "The usual one.", always("native")),
    _of_cuda("get_gencode_flags", "Nothing was built for it.", always("")),
    _of_cuda("get_sync_debug_mode current_blas_handle current_solver_handle", "There is none.", always(0)),
    _of_cuda("is_current_stream_capturing _is_in_bad_fork", "It is not.", always(False)),
    _of_cuda("get_rng_state", _RANDOM, instead(lambda device=None: torch.get_rng_state())),
    _of_cuda("get_rng_state_all", _RANDOM, instead(lambda: [torch.get_rng_state()])),
    _of_cuda("initial_seed", _RANDOM, instead(lambda: torch.initial_seed())),
    _of_cuda("stream device device_of", _NOTHING, instead(contextlib.nullcontext)),
    _of_cuda(
        "current_stream default_stream",
        "Its work is done at once.",
        instead(lambda device=None: pretended_device.Stream()),
    ),
    _of_cuda(
        "set_device set_stream synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all "
        "set_rng_state set_rng_state_all reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
        "reset_accumulated_memory_stats _record_memory_history _dump_snapshot set_sync_debug_mode "
        "set_per_process_memory_fraction init _lazy_init _sleep",
        _NOTHING,
        always(None),
    ),
    Change(
        "torch",
        "torch._C._cuda_*",
        "Torch's core has these functions where it is built for CUDA.",
        _answer_for_the_core,
    ),
    Patch("torch", "cuda.Stream cuda.Event", "Its work is done at once.", instead(pretended_device.Stream)),
    Patch("torch", "cuda.nccl.version", "Programs compare it.", always(_NCCL)),
    Patch("torch", "version.cuda", "The Trainer's `tf32`, for one, looks at it.", instead(_CUDA)),
    Patch(
        "torch",
        "cuda.nvtx.range_push cuda.nvtx.range_pop cuda.nvtx.range_start cuda.nvtx.range_end cuda.nvtx.mark",
        "No profiler looks on.",
        always(0),
    ),
    Patch("torch", "cuda.profiler.start cuda.profiler.stop", "No profiler looks on.", always(None)),
    *(Patch("torch", f"cuda.{name}", "It is one of the device.", instead(kind)) for name, kind in _MADE.items()),
    Patch("torch", "Tensor.type", "It has the old types' names.", around(_type)),
)


# Automatic mixed precision (`torch.autocast`) on the pretended device, as CUDA has it.

_LOWER = (
    "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution linear matmul mm mv prelu lstm_cell gru_cell "
    "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
)
_FULL = (
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy_loss "
    "cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log "
    "log10 log1p log2 log_softmax.int margin_ranking_loss mse_loss nll_loss nll_loss2d norm.Scalar norm.ScalarOpt_dim "
    "pdist poisson_nll_loss "
    "pow.Tensor_Scalar pow.Tensor_Tensor prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax.int "
    "softplus sum sum.dim_IntList tan triplet_margin_loss"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
_AUTOCAST = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("AutocastPrivateUse1"))  # type: ignore[arg-type]


def _widest(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    is_full = any(each.dtype == torch.float32 for each in tensors)
    return torch.float32 if is_full else torch.get_autocast_dtype(pretended_device.NAME)


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def is_kept(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch keeps the copy of a tensor (`cached_cast` in aten/src/ATen/autocast_mode.cpp)."""
    is_weight = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    is_lowered = tensor.dtype == torch.float32 != dtype
    return is_weight and is_lowered and torch.is_autocast_cache_enabled()


class _Casts:
    """The kernels, and the copies of weights."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def kernel_of(self, operator: Any, dtype_of: Callable[[Iterable[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = dtype_of(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                return operator(
                    *(self._cast(each, dtype) for each in args),
                    **{name: self._cast(each, dtype) for name, each in kwargs.items()},
                )

        return kernel

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast(each, dtype) for each in value)
        if not isinstance(value, torch.Tensor) or value.dtype == dtype:
            return value
        if not value.is_floating_point() or value.dtype == torch.float64 or value.device.type == "cpu":
            return value
        if not is_kept(value, dtype):
            return value.to(dtype)
        kept, copy = self.copies.get(id(value), (None, None))
        if kept is None or kept() is not value or copy is None or copy.dtype != dtype:
            copy = value.to(dtype)
            self.copies[id(value)] = (weakref.ref(value), copy)
        return copy


# Torch keeps what a library has registered as long as the library is alive.
_libraries: list[Any] = []
_casts = _Casts()


def _register_casts(module: Any, mode: FakeTensors) -> None:
    key = "AutocastPrivateUse1"
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    operators = torch.library.Library("aten", "IMPL", key)
    for names, dtype_of in (
        (_LOWER, lambda tensors: torch.get_autocast_dtype(pretended_device.NAME)),
        (_FULL, lambda tensors: torch.float32),
        (_WIDEST, _widest),
    ):
        for name in names.split():
            operator = _operator(name)
            if operator is not None:
                operators.impl(name, _casts.kernel_of(operator, dtype_of))
    _libraries.extend((others, operators))


def _clear_copies(original: Any) -> None:
    _casts.copies.clear()
    original()


def _of_own_device(original: Any, *args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
    if args and isinstance(args[0], str):
        device_type, args = args[0], args[1:]
    return original(own_device(device_type or "cuda"), *args, **kwargs)


_ANSWERS_FOR_IT = "Where no device is given, torch means CUDA."
_MIXED_PRECISION: Table = (
    Patch(
        "torch",
        "autocast.__init__",
        '`torch.autocast("cuda")` casts on the pretended device.',
        around(
            lambda original, context, device_type, *args, **kwargs: original(
                context, own_device(device_type), *args, **kwargs
            )
        ),
    ),
    Patch(
        "torch.amp.autocast_mode",
        "_cast",
        "It casts tensors of the pretended device.",
        around(lambda original, value, device_type, dtype: original(value, own_device(device_type), dtype)),
    ),
    Patch("torch.amp.autocast_mode", "is_autocast_available", _ANSWERS_FOR_IT, around(_of_own_device)),
    Patch(
        "torch",
        "is_autocast_enabled get_autocast_dtype set_autocast_enabled set_autocast_dtype",
        _ANSWERS_FOR_IT,
        around(_of_own_device),
    ),
    Patch(
        "torch",
        "get_autocast_gpu_dtype",
        "It is that of the pretended device.",
        instead(lambda: torch.get_autocast_dtype(pretended_device.NAME)),
    ),
    Patch(
        "torch",
        "set_autocast_gpu_dtype",
        "It is that of the pretended device.",
        instead(lambda dtype: torch.set_autocast_dtype(pretended_device.NAME, dtype)),
    ),
    Change(
        "torch",
        "set_autocast_dtype",
        "CUDA begins with 16 bits.",
        lambda module, mode: torch.set_autocast_dtype(pretended_device.NAME, torch.float16),
    ),
    Change("torch", "operators under autocast", "A device of another maker has none.", _register_casts),
    Patch("torch", "clear_autocast_cache", "The copies of weights are here.", around(_clear_copies)),
)

PATCHES: Table = (*_TENSORS, *_MIXED_PRECISION, *_CUDA_FUNCTIONS)
