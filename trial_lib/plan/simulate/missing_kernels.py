"""Operators of torch's that lack a fake implementation, or a formula of their FLOPs, in a foreseen run.

* Recurrent layers run on a device of another maker by fused kernels. Torch's own decompositions take their place. They
  run a layer step by step, as torch does on a CPU. On CUDA cuDNN runs it at once, and keeps about as much for the
  backward pass.
* What packs sequences without their padding reads the lengths in memory, where a fake tensor has none. Plain indexing
  takes its place.
* Products by groups, by which a mixture of experts computes all its experts at once, have no formula. Their fake
  implementation takes bfloat16 alone, and their kernel takes other formats as well
  (aten/src/ATen/native/GroupedMMUtils.h).
* A `TransformerEncoder` that evaluates leaves out padding by nested tensors. They have no fake implementation, so its
  way of training takes their place.
* The parts of a batch norm that all ranks share have no fake implementation (`torch.nn.SyncBatchNorm`,
  aten/src/ATen/native/cuda/Normalization.cu).
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from trial_lib.plan.simulate import pretended_device
from trial_lib.plan.simulate.known_numbers import known_numbers
from trial_lib.rank.flops import grouped_products
from trial_lib.rank.patching import when_imported

# The function of torch, its decomposition for padded sequences and that for packed ones.
_LAYERS = (
    ("lstm", "lstm_impl", "lstm_data_impl"),
    ("gru", "gru_impl", "gru_impl_data"),
    ("rnn_tanh", "rnn_tanh_input", "rnn_tanh_data"),
    ("rnn_relu", "rnn_relu_input", "rnn_relu_data"),
)
_ALSO = (torch.float32, torch.float16)
_HALVES = (torch.float16, torch.bfloat16)
# Torch keeps what a library has registered as long as the library is alive.
_libraries: list[Any] = []


def install() -> None:
    """Adds or replaces them. Call it once, before the program runs."""
    _replace_recurrent_layers()
    _add_products_by_groups()
    _add_shared_norms()
    torch.backends.mha.set_fastpath_enabled(False)


def _replace_recurrent_layers() -> None:
    # Replaces the functions. A version of torch without a decomposition keeps its own.
    for name, of_padded, of_packed in _LAYERS:
        padded, packed = (getattr(decompositions, each, None) for each in (of_padded, of_packed))
        if padded is not None and packed is not None:
            setattr(torch._VF, name, _by_arguments(padded, packed))
    functions: Any = torch._VF
    functions._pack_padded_sequence = _packing(functions._pack_padded_sequence)
    functions._pad_packed_sequence = _padding(functions._pad_packed_sequence)


def _by_arguments(padded: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
    def layer(*arguments: Any) -> Any:
        # A flag whether the layer has biases comes after the weights, which are the only list of tensors there.
        is_packed = isinstance(arguments[3], (list, tuple))
        return packed(*arguments) if is_packed else padded(*arguments)

    return layer


def _packing(original: Callable[..., Any]) -> Callable[..., Any]:
    def pack(padded: torch.Tensor, lengths: Any, batch_first: bool) -> Any:
        """For known lengths in descending order."""
        known = _known(lengths)
        if known is None:
            return original(padded, lengths, batch_first)
        sizes = (known.unsqueeze(0) > _numbers_to(int(known.max())).unsqueeze(1)).sum(1)
        steps, samples = _places(sizes)
        return padded[(samples, steps) if batch_first else (steps, samples)], sizes

    return pack


def _padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def pad(rows: torch.Tensor, sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> Any:
        """For known numbers of samples in each step."""
        known = _known(sizes)
        if known is None:
            return original(rows, sizes, batch_first, padding_value, total_length)
        samples = int(known[0])
        empty = rows.new_full((max(len(known), total_length), samples, *rows.shape[1:]), padding_value)
        padded = empty.index_put(_places(known), rows)
        lengths = (known.unsqueeze(0) > _numbers_to(samples).unsqueeze(1)).sum(1)
        return padded.transpose(0, 1) if batch_first else padded, lengths

    return pad


def _known(numbers: torch.Tensor) -> torch.Tensor | None:
    return known_numbers(numbers) if isinstance(numbers, FakeTensor) else numbers


def _places(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    steps = torch.repeat_interleave(_numbers_to(len(sizes)), sizes)
    return steps, torch.cat([_numbers_to(int(size)) for size in sizes])


def _numbers_to(end: int) -> torch.Tensor:
    # The program may have another default.
    return torch.arange(end, device="cpu")


def _add_products_by_groups() -> None:
    flop_registry.update(grouped_products())
    when_imported("transformers.integrations.moe", lambda module: flop_registry.update(grouped_products()))
    kernels: Any = getattr(torch, "_meta_registrations", None)
    # An older torch does not have them.
    original = getattr(kernels, "_meta_grouped_mm_common", None)
    made = getattr(kernels, "_create_grouped_mm_output_tensor", None)
    if original is not None and made is not None:
        kernels._meta_grouped_mm_common = _of_other_formats(original, made)


def _of_other_formats(original: Any, made: Any) -> Any:
    @functools.wraps(original)
    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = mat_a.dtype
        if dtype != mat_b.dtype or dtype not in _ALSO or kwargs.get("scale_a") is not None:
            return original(mat_a, mat_b, *args, **kwargs)  # type: ignore[no-any-return]
        return made(mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype") or dtype)  # type: ignore[no-any-return]

    return shape


def _add_shared_norms() -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, shape in _OF_SHARED_NORMS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shape, "Meta")
    _libraries.append(library)


def _per_channel(input_: torch.Tensor) -> torch.Tensor:
    return input_.new_empty(input_.shape[1], dtype=torch.float32 if input_.dtype in _HALVES else input_.dtype)


def _stats(input_: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _per_channel(input_), _per_channel(input_)


def _sums(
    grad_out: torch.Tensor,
    input_: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    *wanted: bool,
) -> tuple[torch.Tensor, ...]:
    of_weight = weight if weight is not None else mean
    of_input, *of_parameters = wanted
    sums = [torch.empty_like(mean) if of_input else mean.new_empty(0) for _ in range(2)]
    return (*sums, *(torch.empty_like(of_weight) if each else mean.new_empty(0) for each in of_parameters))


_OF_SHARED_NORMS: dict[str, Callable[..., Any]] = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _stats,
    "batch_norm_elemt": lambda input_, *_: torch.empty_like(input_),
    "batch_norm_backward_reduce": _sums,
    "batch_norm_backward_elemt": lambda gradient, input_, *_: torch.empty_like(input_),
}


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


def install_mixed_precision() -> None:
    """Registers the operators. Call it once, after the device."""
    key = "AutocastPrivateUse1"
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    operators = torch.library.Library("aten", "IMPL", key)
    casts = _Casts()
    for names, dtype_of in (
        (_LOWER, lambda tensors: torch.get_autocast_dtype(pretended_device.NAME)),
        (_FULL, lambda tensors: torch.float32),
        (_WIDEST, _widest),
    ):
        for name in names.split():
            operator = _operator(name)
            if operator is not None:
                operators.impl(name, casts.kernel_of(operator, dtype_of))
    _libraries.extend((others, operators))
    original = torch.clear_autocast_cache

    def clear() -> None:
        casts.copies.clear()
        original()

    torch.clear_autocast_cache = clear


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
