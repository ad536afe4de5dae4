"""Operators that CUDA computes by one kernel, and torch's build for CPUs by several.

The several keep what lies between them for the backward pass, and each moves its numbers. So a model would need more
memory and time than on the device.

* `torch.rms_norm` keeps its input and one number for each row (`_fused_rms_norm`,
  aten/src/ATen/native/cuda/layer_norm_kernel.cu). Where input and weight differ in their types, CUDA computes it by
  several kernels too (aten/src/ATen/native/layer_norm.cpp). Autocast gives it numbers of 32 bits, in the versions of
  torch that list it (ATen/autocast_mode.h).
* A cell of a GRU has a fused kernel on every device but a CPU, without a fake implementation. Plain formulas take its
  place.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.plan.simulate import pretended_device
from trial_lib.plan.simulate.kernel_packages import with_pretended_device
from trial_lib.plan.simulate.logs import OperationLog, bytes_of
from trial_lib.rank.patching import stand_in, stand_in_for_scripts, when_imported

_Note = Callable[[torch.Tensor, list[torch.Tensor]], None]
_Plain = Callable[..., torch.Tensor]


def install(operations: OperationLog) -> None:
    """Replaces them. Call it once, before the program runs."""
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        _replace_norm(operations)
    cells: Any = torch._VF
    original = cells.gru_cell
    cells.gru_cell = _of_device(original)
    builtin: Any = torch.jit._builtins
    builtin._register_builtin(cells.gru_cell, builtin._find_builtin(original))


def _replace_norm(operations: OperationLog) -> None:
    def note(of: torch.Tensor, moved: list[torch.Tensor]) -> None:
        operations.work("norm", of, float(of.numel()), float(sum(map(bytes_of, moved))), on_host=False)

    original = torch.rms_norm

    @functools.wraps(original)
    def rms_norm(
        input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        if is_on_device(input) and _is_cast() and casts_norms():
            input, weight = input.float(), None if weight is None else weight.float()
        is_known = weight is None or (weight.dtype == input.dtype and tuple(weight.shape) == tuple(normalized_shape))
        fits = tuple(input.shape[-len(normalized_shape) :]) == tuple(normalized_shape)
        if not (is_on_device(input) and is_known and fits and input.is_floating_point()):
            return original(input, normalized_shape, weight, eps)
        function: Any = _Norm
        plain = functools.partial(original, normalized_shape=normalized_shape, eps=eps)
        normed: torch.Tensor = function.apply(input, weight, len(normalized_shape), note, plain)[0]
        return normed

    stand_in_for_scripts("rms_norm", original, rms_norm)


def _is_cast() -> bool:
    return torch.is_autocast_enabled(pretended_device.NAME)


@functools.cache
def casts_norms() -> bool:
    """Whether the autocast of this torch computes `torch.rms_norm` with 32 bits, by its own list for CUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    return header.exists() and "_(rms_norm)" in header.read_text()


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no numbers and is on the device."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == pretended_device.NAME


class _Norm(torch.autograd.Function):
    """The fused kernel: what it keeps, and what it moves."""

    @staticmethod
    def forward(
        input_: torch.Tensor, weight: torch.Tensor | None, dimensions: int, note: _Note, plain: _Plain
    ) -> tuple[torch.Tensor, torch.Tensor]:
        leading = input_.shape[: input_.dim() - dimensions]
        of_rows = input_.new_empty((*leading, *(1,) * dimensions), dtype=torch.float32)
        normed = torch.empty_like(input_, memory_format=torch.contiguous_format)
        note(input_, [input_, normed])
        return normed, of_rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input_, weight, _, ctx.note, ctx.plain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input_, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> Any:
        input_, weight, _of_rows = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None, None
        if torch.is_grad_enabled():
            # The gradient has a gradient of its own, for which there is no fused kernel.
            wanted = [each for each in (input_, weight) if each is not None and each.requires_grad]
            found = iter(torch.autograd.grad(ctx.plain(input_, weight=weight), wanted, gradient, create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
        of_input = torch.empty_like(input_, memory_format=torch.contiguous_format)
        ctx.note(input_, [gradient, input_, of_input])
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        of_weight = torch.empty_like(weight) if weight is not None and needs_weight else None
        return of_input if needs_input else None, of_weight, None, None, None


def _of_device(original: Any) -> Any:
    @functools.wraps(original)
    def gru_cell(
        input_: torch.Tensor,
        hidden: torch.Tensor,
        of_input: torch.Tensor,
        of_hidden: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        hidden_bias: torch.Tensor | None = None,
    ) -> Any:
        if not any(map(is_on_device, (input_, hidden, of_input))):
            return original(input_, hidden, of_input, of_hidden, input_bias, hidden_bias)
        if _is_cast():
            hidden = hidden.to(torch.get_autocast_dtype(pretended_device.NAME))
        linear = torch.nn.functional.linear
        inputs, hiddens = linear(input_, of_input, input_bias), linear(hidden, of_hidden, hidden_bias)
        (reset_i, update_i, new_i), (reset_h, update_h, new_h) = inputs.chunk(3, 1), hiddens.chunk(3, 1)
        reset, update = (reset_i + reset_h).sigmoid(), (update_i + update_h).sigmoid()
        new = (new_i + reset * new_h).tanh()
        return (hidden - new) * update + new

    return gru_cell


# Attention on the pretended device: the kernel that CUDA would take.

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
    """The attention by a fused kernel; None if CUDA would take the plain formula too.

    Arguments are those of `scaled_dot_product_attention`, of shape (samples, heads, positions, numbers).
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


def install_attention_kernels() -> None:
    """Replaces torch's function, the package's, and transformers' choice. Call it once, before the program runs."""
    original = torch.nn.functional.scaled_dot_product_attention

    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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
        """Numbers that `score_mod` has learned get no gradient."""
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
    for name, function in (
        ("flash_attn_func", _attend),
        ("flash_attn_varlen_func", _attend_to_sequences),
        ("flash_attn_qkvpacked_func", _attend_packed),
        ("flash_attn_kvpacked_func", _attend_packed_keys),
    ):
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
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    out = attention(query, key, value, None, dropout_p, causal, softmax_scale, enable_gqa=True)
    if out is None:
        raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")  # the package's own words
    return out.transpose(1, 2)


def _attend_packed(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    query, key, value = qkv.unbind(2)
    return _attend(query, key, value, *args, **kwargs)


def _attend_packed_keys(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    forward = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = forward(q, k, v, *lengths, dropout_p, causal, False, scale=softmax_scale)[0]
    return out
