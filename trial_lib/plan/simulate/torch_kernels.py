"""Kernels of torch in a foreseen run: those that a fake tensor lacks, and those that CUDA has and a CPU has not.

What lacks a fake implementation, or a formula of its FLOPs:

* Recurrent layers run on a device of another maker by fused kernels. Torch's own decompositions take their place. They
  run a layer step by step, as torch does on a CPU. On CUDA cuDNN runs it at once, and keeps about as much for the
  backward pass.
* Products by groups, by which a mixture of experts computes all its experts at once, have a kernel for more formats
  than their fake implementation (aten/src/ATen/native/GroupedMMUtils.h).
* The parts of a batch norm that all ranks share (`torch.nn.SyncBatchNorm`,
  aten/src/ATen/native/cuda/Normalization.cu).

What CUDA computes by one kernel, and torch's build for CPUs by several. They keep what lies between them for the
backward pass, and each moves its numbers. So a model would need more memory and time than on the device.

* `torch.rms_norm` keeps its input and one number for each row (`_fused_rms_norm`,
  aten/src/ATen/native/cuda/layer_norm_kernel.cu). Where input and weight differ in their types, CUDA computes it by
  several kernels too (aten/src/ATen/native/layer_norm.cpp). Autocast gives it numbers of 32 bits, in the versions of
  torch that list it (ATen/autocast_mode.h).
* A cell of a GRU has a fused kernel on every device but a CPU, without a fake implementation. Plain formulas take its
  place.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry

from zerotune.trial_lib.plan.simulate import pretended_device
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.known_numbers import known_numbers
from zerotune.trial_lib.plan.simulate.logs import bytes_of
from zerotune.trial_lib.rank.flops import grouped_products
from zerotune.trial_lib.rank.patching import Change, Patch, Table

# By the function of torch: its decomposition for padded sequences and that for packed ones.
_LAYERS = {
    "lstm": ("lstm_impl", "lstm_data_impl"),
    "gru": ("gru_impl", "gru_impl_data"),
    "rnn_tanh": ("rnn_tanh_input", "rnn_tanh_data"),
    "rnn_relu": ("rnn_relu_input", "rnn_relu_data"),
}
_ALSO = (torch.float32, torch.float16)
_HALVES = (torch.float16, torch.bfloat16)
# Torch keeps what a library has registered as long as the library is alive.
_libraries: list[Any] = []


def _decomposed(name: str, original: Any, mode: FakeTensors) -> Any:
    padded, packed = (getattr(decompositions, each, None) for each in _LAYERS[name])
    if padded is None or packed is None:
        # A version of torch without a decomposition keeps its own.
        return original

    def layer(*arguments: Any) -> Any:
        # A flag whether the layer has biases comes after the weights, which are the only list of tensors there.
        is_packed = isinstance(arguments[3], (list, tuple))
        return packed(*arguments) if is_packed else padded(*arguments)

    return layer


def _packing(original: Callable[..., Any], mode: FakeTensors) -> Callable[..., Any]:
    def pack(padded: torch.Tensor, lengths: Any, batch_first: bool) -> Any:
        known = _known(lengths)
        if known is None:
            return original(padded, lengths, batch_first)
        sizes = (known.unsqueeze(0) > _numbers_to(int(known.max())).unsqueeze(1)).sum(1)
        steps, samples = _places(sizes)
        return padded[(samples, steps) if batch_first else (steps, samples)], sizes

    return pack


def _padding(original: Callable[..., Any], mode: FakeTensors) -> Callable[..., Any]:
    def pad(rows: torch.Tensor, sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> Any:
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


def _of_other_formats(original: Any, mode: FakeTensors) -> Any:
    made = getattr(getattr(torch, "_meta_registrations", None), "_create_grouped_mm_output_tensor", None)
    if made is None:
        return original

    @functools.wraps(original)
    def shape(mat_a: torch.Tensor, mat_b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = mat_a.dtype
        if dtype != mat_b.dtype or dtype not in _ALSO or kwargs.get("scale_a") is not None:
            return original(mat_a, mat_b, *args, **kwargs)  # type: ignore[no-any-return]
        return made(mat_a, mat_b, kwargs.get("offs"), kwargs.get("out_dtype") or dtype)  # type: ignore[no-any-return]

    return shape


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


def _add_shared_norms(module: Any, mode: FakeTensors) -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, shape in _OF_SHARED_NORMS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shape, "Meta")
    _libraries.append(library)


# Norms and cells by one kernel.

_Note = Callable[[torch.Tensor, list[torch.Tensor]], None]
_Plain = Callable[..., torch.Tensor]


def _rms_norm(original: Any, mode: FakeTensors) -> Any:
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):
        return original

    def note(of: torch.Tensor, moved: list[torch.Tensor]) -> None:
        mode.operations.work("norm", of, float(of.numel()), float(sum(map(bytes_of, moved))), on_host=False)

    @functools.wraps(original)
    def rms_norm(
        input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> Any:
        if is_on_device(input) and _is_cast() and casts_norms():
            input, weight = input.float(), None if weight is None else weight.float()
        is_known = weight is None or (weight.dtype == input.dtype and tuple(weight.shape) == tuple(normalized_shape))
        fits = tuple(input.shape[-len(normalized_shape) :]) == tuple(normalized_shape)
        if not (is_on_device(input) and is_known and fits and input.is_floating_point()):
            return original(input, normalized_shape, weight, eps)
        function: Any = _Norm
        plain = functools.partial(original, normalized_shape=normalized_shape, eps=eps)
        return function.apply(input, weight, len(normalized_shape), note, plain)[0]

    return rms_norm


def _is_cast() -> bool:
    return torch.is_autocast_enabled(pretended_device.NAME)


@functools.cache
def casts_norms() -> bool:
    """Whether the autocast of this torch computes `torch.rms_norm` with 32 bits, by its own list for CUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    return header.exists() and "_(rms_norm)" in header.read_text()


def is_on_device(tensor: torch.Tensor) -> bool:
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


def _gru_cell(original: Any, mode: FakeTensors) -> Any:
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


# Torch takes them apart on a device of another maker, before a mode sees them (ATen/native/native_functions.yaml).
_BACKWARD = ("silu_backward", "mish_backward")


def _add_backward_kernels(module: Any, mode: FakeTensors) -> None:
    library = torch.library.Library("aten", "IMPL")
    for name in _BACKWARD:
        library.impl(name, lambda gradient, input_: torch.empty_like(input_), "PrivateUse1")
    _libraries.append(library)


def _add_grouped_products(module: Any, mode: FakeTensors) -> None:
    flop_registry.update(grouped_products())


_LENGTHS = "It reads the lengths in memory, where a fake tensor has none. Plain indexing takes its place."
_FLOPS = "They have no formula of their FLOPs."
PATCHES: Table = (
    *(
        Patch("torch", f"_VF.{name}", "It has no fake implementation.", functools.partial(_decomposed, name))
        for name in _LAYERS
    ),
    Patch("torch", "_VF._pack_padded_sequence", _LENGTHS, _packing),
    Patch("torch", "_VF._pad_packed_sequence", _LENGTHS, _padding),
    Change("torch", "products by groups", _FLOPS, _add_grouped_products),
    Change("transformers.integrations.moe", "products by groups", _FLOPS, _add_grouped_products),
    Patch(
        "torch",
        "_meta_registrations._meta_grouped_mm_common",
        "The fake implementation takes bfloat16 alone.",
        _of_other_formats,
        may_lack=True,
    ),
    Change("torch", "aten::batch_norm_*", "The norms that ranks share have no fake implementation.", _add_shared_norms),
    Change(
        "torch",
        "backends.mha.set_fastpath_enabled",
        "A `TransformerEncoder` that evaluates leaves out padding by nested tensors, which have no fake "
        "implementation. Its way of training takes their place.",
        lambda module, mode: torch.backends.mha.set_fastpath_enabled(False),
    ),
    Change("torch", " ".join(_BACKWARD), "CUDA has a kernel for it.", _add_backward_kernels),
    Patch("torch", "rms_norm", "CUDA has a kernel for it.", _rms_norm),
    *(
        Change(
            module,
            "_foreach_supported_types",
            "By this list of classes torch updates and clips all parameters at once, with a copy of them.",
            lambda module, mode: module._foreach_supported_types.append(FakeTensor),
        )
        for module in ("torch.optim.optimizer", "torch.utils._foreach_utils")
    ),
    Patch("torch", "_VF.gru_cell", "CUDA has a kernel for it.", _gru_cell),
)
