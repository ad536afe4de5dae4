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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import pretended_device
from trial_lib.foresee.inside.operation_costs import bytes_of
from trial_lib.foresee.inside.operation_log import OperationLog
from trial_lib.intercept.stand_in import stand_in_for_scripts

_Note = Callable[[torch.Tensor, list[torch.Tensor]], None]
_Plain = Callable[..., torch.Tensor]


def install(operations: OperationLog) -> None:
    """Replaces them. Call it once, before the program runs.

    Args:
        operations: notes the work of the norm.
    """
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
        input: torch.Tensor,
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """Replaces `torch.rms_norm`."""
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
    """Returns whether the autocast of this torch computes `torch.rms_norm` with 32 bits, by its own list for CUDA."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    return header.exists() and "_(rms_norm)" in header.read_text()


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has no numbers and is on the device."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == pretended_device.NAME


class _Norm(torch.autograd.Function):
    """The fused kernel: what it keeps, and what it moves."""

    @staticmethod
    def forward(
        input_: torch.Tensor, weight: torch.Tensor | None, dimensions: int, note: _Note, plain: _Plain
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the result and the number of each row."""
        leading = input_.shape[: input_.dim() - dimensions]
        of_rows = input_.new_empty((*leading, *(1,) * dimensions), dtype=torch.float32)
        normed = torch.empty_like(input_, memory_format=torch.contiguous_format)
        note(input_, [input_, normed])
        return normed, of_rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the input, the weight and the number of each row."""
        input_, weight, _, ctx.note, ctx.plain = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input_, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> Any:
        """Returns the gradients of the input and of the weight."""
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
        """Replaces `torch._VF.gru_cell`."""
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
