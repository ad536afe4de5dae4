"""The flash-attn package in a foreseen run: torch's own fused kernel, which keeps the same tensors, stands for it.

Its functions take tensors of shape (samples, positions, heads, numbers), or (tokens, heads, numbers) with the
beginnings of the sequences. A model of transformers that asks for `flash_attention_2` gets torch's function (`sdpa`),
whose kernel is the same, so that the package need not be installed.
"""

import functools
from types import ModuleType
from typing import Any

import torch

from trial_lib.foresee.inside.libraries import attention_kernels
from trial_lib.intercept.post_import import when_imported
from trial_lib.intercept.stand_in import stand_in

_CHECK = "_check_and_adjust_attn_implementation"


def install() -> None:
    """Replaces the package's functions and transformers' choice. Call it before the user's program runs."""
    when_imported("flash_attn", _replace)
    when_imported("transformers.modeling_utils", _choose_own_kernel)


def _choose_own_kernel(module: ModuleType) -> None:
    model_class: Any = module.PreTrainedModel
    original = getattr(model_class, _CHECK, None)
    if original is None:
        return

    @functools.wraps(original)
    def check(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the check whether flash-attn is there."""
        if isinstance(attn_implementation, str) and attn_implementation.startswith("flash_attention_"):
            attn_implementation = "sdpa"
        return original(model, attn_implementation, *args, **kwargs)

    setattr(model_class, _CHECK, check)


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
    out = attention_kernels.attention(query, key, value, None, dropout_p, causal, softmax_scale, enable_gqa=True)
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
