"""Automatic mixed precision (`torch.autocast`) on the pretended device, as CUDA has it.

Torch keeps a table of operators for each kind of device, and has none for a device of another maker. The names are from
torch's page about automatic mixed precision ("CUDA Ops that can autocast to float16", "... to float32", "... that
promote to the widest input type"). Other operators promote their inputs by themselves. Weights are cast once, and the
copies live until the outermost `autocast` ends, as torch's cache does.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trial_lib.foresee.inside import pretended_device

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
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Registers the operators. Call it once, after the device."""
    key = "AutocastPrivateUse1"
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    operators = torch.library.Library("aten", "IMPL", key)
    casts = _Casts()
    for names, of_kernel in ((_LOWER, casts.lower), (_FULL, casts.full), (_WIDEST, casts.widest)):
        for name in names.split():
            operator = _operator(name)
            if operator is not None:
                operators.impl(name, of_kernel(operator))
    _libraries.extend((others, operators))
    original = torch.clear_autocast_cache

    def clear() -> None:
        """Replaces `torch.clear_autocast_cache`."""
        casts.forget()
        original()

    torch.clear_autocast_cache = clear


def _operator(name: str) -> Any:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def is_kept(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether torch keeps the copy of a tensor (`cached_cast` in aten/src/ATen/autocast_mode.cpp)."""
    is_weight = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    is_lowered = tensor.dtype == torch.float32 != dtype
    return is_weight and is_lowered and torch.is_autocast_cache_enabled()


class _Casts:
    """The kernels, and the copies of weights."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def lower(self, operator: Any) -> Callable[..., Any]:
        """Returns the kernel of an operator that is cast to the lower precision."""
        return self._kernel(operator, lambda tensors: torch.get_autocast_dtype(pretended_device.NAME))

    def full(self, operator: Any) -> Callable[..., Any]:
        """Returns the kernel of an operator that is cast to float32."""
        return self._kernel(operator, lambda tensors: torch.float32)

    def widest(self, operator: Any) -> Callable[..., Any]:
        """Returns the kernel of an operator whose inputs are cast to the widest of them."""

        def dtype_of(tensors: Iterable[torch.Tensor]) -> torch.dtype:
            is_full = any(each.dtype == torch.float32 for each in tensors)
            return torch.float32 if is_full else torch.get_autocast_dtype(pretended_device.NAME)

        return self._kernel(operator, dtype_of)

    def forget(self) -> None:
        """Drops the copies of weights."""
        self._copies.clear()

    def _kernel(self, operator: Any, dtype_of: Callable[[Iterable[torch.Tensor]], torch.dtype]) -> Callable[..., Any]:
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
        kept, copy = self._copies.get(id(value), (None, None))
        if kept is None or kept() is not value or copy is None or copy.dtype != dtype:
            copy = value.to(dtype)
            self._copies[id(value)] = (weakref.ref(value), copy)
        return copy
