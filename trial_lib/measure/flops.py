"""Model FLOPs of one micro-batch, counted on the real model while it trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Returns the FLOPs of attention's two matrix products; a causal mask is not subtracted (PaLM, appendix B)."""
    batch, heads, queries, depth = query.shape
    keys = key.shape[2]
    return 2 * batch * heads * queries * keys * (depth + value.shape[3])


def _forward_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _attention_flops(query, key, value)


def _backward_attention(_gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Twice the forward pass. torch's own formula adds the scores that a fused kernel computes again; recomputation is
    # work of the implementation, not of the model.
    return 2 * _attention_flops(query, key, value)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)
    for name in _ATTENTION:
        if hasattr(aten, name):
            formulas[getattr(aten, name)] = _forward_attention
            formulas[getattr(aten, f"{name}_backward")] = _backward_attention
    return formulas


def _is_in_backward() -> bool:
    # As `torch.utils.checkpoint` asks it.
    return bool(torch._C._current_graph_task_id() != -1)


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention while it is entered.

    Formulas are torch's (`torch.utils.flop_counter`), with attention counted on every kernel, the CPU's included.
    Recomputation under activation checkpointing is left out: it is the work that runs during the backward pass with
    gradients enabled.

    Attributes:
        flops: counted so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._formulas = _formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and adds what it costs."""
        names = {each.__name__ for each in types}
        if "DTensor" in names:
            # It comes back in its parts: what this rank computes of it.
            return NotImplemented
        if "FakeTensor" in names:
            # By which a DTensor finds out the shape of a result.
            return func(*args, **kwargs)
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        output = func(*args, **kwargs)
        if formula is not None and not (_is_in_backward() and torch.is_grad_enabled()):
            self.flops += int(formula(*args, **kwargs, out_val=output))
        return output
