"""Attention on the pretended device: the kernel that CUDA would take.

Torch asks a device which kernel it has. A device without kernels gets the plain formula, whose table of scores by
queries and keys decides the memory of a step. CUDA takes a fused kernel, which never makes that table. The rules are
those of torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for a GPU of compute capability 8 and later.

The flash-attn package keeps the same tensors as torch's fused kernel, which stands for it. Its functions take tensors
of shape (samples, positions, heads, numbers), or (tokens, heads, numbers) with the beginnings of the sequences. A model
of transformers that asks for `flash_attention_2` gets torch's function (`sdpa`). The package need not be installed.

The fused kernel also stands for torch's flexible attention, which compiles one of its own. A mask of blocks counts as a
causal one: a half of the scores.

Transformers leaves out a mask that hides nothing, so that a fused kernel runs. It looks at the numbers for that, unless
it takes the model for one that is traced (transformers/masking_utils.py). A fake tensor is a sign of tracing there. In
a foreseen run it is none, because the numbers of data are known.
"""

import functools
import math
from types import ModuleType
from typing import Any

import torch

from trial_lib.foresee.inside import pretended_device
from trial_lib.foresee.inside.libraries.kernel_packages import with_pretended_device
from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_CHECK = "_check_and_adjust_attn_implementation"
_DIMENSIONS = 4  # samples, heads, positions, numbers of a head
# Functions of transformers that take another way if a tensor is on a device of the type "cuda".
_WITH_WORDS = {
    "transformers.modeling_attn_mask_utils": ("_prepare_4d_causal_attention_mask_for_sdpa",),
    "transformers.integrations.moe": ("_can_use_grouped_mm",),
}

notes: set[str] = set()
"""What a plan of this run says of its attention."""

_asked: list[str] = []
_MASKED = (
    "The model asks for {}, which skips what padding or a window hides. It is foreseen as torch's attention with a "
    "mask, so memory and time of such batches are rather too high."
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Returns the attention by a fused kernel; None if CUDA would take the plain formula too.

    Args:
        query: of shape (samples, heads, positions, numbers).
        key: likewise; with fewer heads if `enable_gqa`.
        value: as `key`.
        attn_mask: what may be seen, as true, or what is added to scores.
        dropout_p: share of the scores that are dropped.
        is_causal: whether a position sees itself and earlier ones alone.
        scale: of the scores.
        enable_gqa: whether groups of query heads share a key head.
    """
    if not query.dim() == key.dim() == value.dim() == _DIMENSIONS:
        return None
    numbers = query.shape[-1]
    if key.shape[-1] != numbers or query.dtype != key.dtype or query.dtype != value.dtype:
        return None
    kernels = torch.ops.aten
    if attn_mask is None and _is_flash(query, value):
        # The kernel wants heads of a multiple of eight numbers.
        padded = [_padded(each) for each in (query, key, value)]
        factor = scale if scale is not None else 1 / math.sqrt(numbers)
        kernel = kernels._scaled_dot_product_flash_attention
        out: torch.Tensor = kernel(*padded, dropout_p, is_causal, False, scale=factor)[0]
        return out if out.shape[-1] == numbers else out[..., :numbers]
    shares_heads = enable_gqa and key.shape[1] != query.shape[1]
    if shares_heads or query.dtype not in (*_HALF, torch.float32):
        return None
    bias = None
    if attn_mask is not None:
        notes.update(map(_MASKED.format, _asked))
        bias = _as_bias(attn_mask, query.dtype)
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    with_sums = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    made: torch.Tensor = kernels._scaled_dot_product_efficient_attention(
        query, key, value, bias, with_sums, dropout_p, is_causal, scale=scale
    )[0]
    return made


def _is_flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    numbers = query.shape[-1]
    return query.dtype in _HALF and numbers <= _LARGEST_HEAD and value.shape[-1] == numbers


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def install() -> None:
    """Replaces torch's function, the package's, and transformers' choice. Call it once, before the program runs."""
    original = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces `torch.nn.functional.scaled_dot_product_attention`."""
        fused = attention(query, *args, **kwargs) if query.device.type == pretended_device.NAME else None
        return original(query, *args, **kwargs) if fused is None else fused

    stand_in("scaled_dot_product_attention", original, scaled_dot_product_attention)
    when_imported("flash_attn", _replace)
    when_imported("torch.nn.attention.flex_attention", _replace_flexible)
    when_imported("transformers.modeling_utils", _choose_own_kernel)
    when_imported("transformers.utils.import_utils", _see_no_tracing)
    for name in _WITH_WORDS:
        when_imported(name, _mean_own_device)


def _see_no_tracing(module: ModuleType) -> None:
    original = getattr(module, "is_fake_tensor", None)  # since transformers 5
    if original is not None:
        stand_in("is_fake_tensor", original, lambda tensor: False)


def _mean_own_device(module: ModuleType) -> None:
    for name in _WITH_WORDS[module.__name__]:
        function: Any = getattr(module, name, None)
        if function is not None:
            function.__code__ = with_pretended_device(function.__code__)


def _choose_own_kernel(module: ModuleType) -> None:
    model_class: Any = module.PreTrainedModel
    original = getattr(model_class, _CHECK, None)
    if original is None:
        return

    @functools.wraps(original)
    def check(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the check whether flash-attn is there."""
        if isinstance(attn_implementation, str) and attn_implementation.startswith("flash_attention_"):
            _asked.append(attn_implementation)
            attn_implementation = "sdpa"
        return original(model, attn_implementation, *args, **kwargs)

    setattr(model_class, _CHECK, check)


def _replace_flexible(module: ModuleType) -> None:
    original: Any = getattr(module, "flex_attention", None)
    if original is None:
        return

    @functools.wraps(original)
    def flex_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """Replaces `flex_attention`. Numbers that `score_mod` has learned get no gradient."""
        if enable_gqa and key.shape[1] != query.shape[1] and not _is_flash(query, value):
            # The efficient kernel, which stands for it then, wants a key for each head.
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        is_partial = block_mask is not None
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_partial, scale=scale, enable_gqa=enable_gqa
        )
        of_rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if return_aux is not None:
            return out, module.AuxOutput(lse=of_rows, max_scores=of_rows)
        return (out, of_rows) if return_lse else out

    stand_in("flex_attention", original, flex_attention)


def _replace(module: ModuleType) -> None:
    for function in (_attend, _attend_to_sequences, _attend_packed, _attend_packed_keys):
        name = _NAMES[function.__name__]
        original = getattr(module, name, None)
        if original is not None:
            stand_in(name, original, function)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Replaces `flash_attn_func`."""
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    out = attention(query, key, value, None, dropout_p, causal, softmax_scale, enable_gqa=True)
    if out is None:
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")  # the package's own words
    return out.transpose(1, 2)


def _attend_packed(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces `flash_attn_qkvpacked_func`."""
    query, key, value = qkv.unbind(2)
    return _attend(query, key, value, *args, **kwargs)


def _attend_packed_keys(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces `flash_attn_kvpacked_func`."""
    key, value = kv.unbind(2)
    return _attend(q, key, value, *args, **kwargs)


def _attend_to_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Replaces `flash_attn_varlen_func`."""
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    forward = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale)[0]
    return out


_NAMES = {
    "_attend": "flash_attn_func",
    "_attend_to_sequences": "flash_attn_varlen_func",
    "_attend_packed": "flash_attn_qkvpacked_func",
    "_attend_packed_keys": "flash_attn_kvpacked_func",
}
