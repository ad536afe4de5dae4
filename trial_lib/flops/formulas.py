"""Model FLOPs of one micro-batch, counted on the real model while it trains."""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trial_lib.flops.grouped_products import grouped_products
from trial_lib.flops.opaque_functions import OpaqueFunctions

aten = torch.ops.aten

# Operators of torch's that work as much as a matrix product, and have no formula (torch 2.13).
_WITHOUT_FORMULA = (
    *("_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "miopen_rnn"),
    *("_scaled_mm_v2", "_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm"),
    *("_addmm_activation", "_cslt_sparse_mm", "_trilinear", "_conv_depthwise2d", "mkldnn_linear"),
    # Other operands split these into their parts. An operand without a shape does not.
    *("linear", "linear_backward", "matmul", "matmul_backward"),
)
# The work of operators in other namespaces is unknown, except for these of torch's, which only move data or describe
# it.
_WITHOUT_WORK = (
    *("prim", "prims", "debugprims", "rngprims", "profiler", "streams", "fsdp", "_dtensor"),
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
)

# Queries of a nested tensor while it runs, as torch's own counter leaves them: the tensor answers, without work.
_QUERIES = (
    *("sym_is_contiguous", "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense"),
    *("size", "sym_size", "stride", "sym_stride", "storage_offset", "sym_storage_offset"),
    *("numel", "sym_numel", "dim"),
)
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The FLOPs of attention's two matrix products. A causal mask is not subtracted (PaLM, appendix B)."""
    batch, heads, queries, depth = query.shape
    keys = key.shape[2]
    return 2 * batch * heads * queries * keys * (depth + value.shape[3])


def _forward_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return _attention_flops(query, key, value)


def _backward_attention(_gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Twice the forward pass. torch's own formula adds the scores that a fused kernel computes again. Recomputation is
    # work of the implementation, not of the model.
    return 2 * _attention_flops(query, key, value)


def _forward_twice(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention_flops(query, key, value)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = {**flop_registry, **grouped_products()}
    for name in _ATTENTION:
        if hasattr(aten, name):
            formulas[getattr(aten, name)] = _forward_attention
            formulas[getattr(aten, f"{name}_backward")] = _backward_attention
    higher_order = torch.ops.higher_order
    if hasattr(higher_order, "flex_attention"):
        formulas[higher_order.flex_attention] = _forward_attention
        formulas[higher_order.flex_attention_backward] = _forward_twice
    return formulas


def _queries() -> frozenset[Any]:
    packets = (getattr(aten, name) for name in _QUERIES if hasattr(aten, name))
    return frozenset(packets) | {torch.ops.prim.layout}


def _is_in_backward() -> bool:
    # The same test as in `torch.utils.checkpoint`.
    return bool(torch._C._current_graph_task_id() != -1)


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention while this is entered.

    The formulas are torch's (`torch.utils.flop_counter`), with attention counted on every kernel, the CPU's included.
    Recomputation under activation checkpointing does not count: it runs during the backward pass with gradients
    enabled. For a higher-order operator without a formula (`cond`, `map`), the operations within it count.

    Attributes:
        flops: counted so far.
        dtypes: of the operands, recomputation included.
    """

    # Without this, torch raises at each of them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.dtypes: set[torch.dtype] = set()
        self._depth = 0
        self._operators: set[str] = set()
        self._functions = OpaqueFunctions()
        self._formulas = _formulas()
        self._queries = _queries()

    @property
    def uncounted(self) -> set[str]:
        """Names of operators and functions that have run without a formula, and may have done such work."""
        return self._operators | self._functions.names

    def __enter__(self) -> "FlopCounter":
        """Starts counting."""
        # Count once, however often the operators below enter the mode again.
        if not self._depth:
            self._functions.__enter__()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stops counting."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and adds its cost."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        names = {each.__name__ for each in types}
        if func._overloadpacket in self._queries or "FakeTensor" in names:
            # A DTensor finds the shape of a result by a call of the latter.
            return func(*args, **kwargs)
        if "DTensor" in names or "NestedTensor" in names:
            # The operation is dispatched again in its parts. For a DTensor these are the parts that this rank computes.
            return NotImplemented
        formula = self._formulas.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default and not _has_no_shape(args):
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        return self._counted(func, formula, func._overloadpacket, args, kwargs)

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        formula = self._formulas.get(func)
        if formula is None:
            args = [self._counting(each) if callable(each) else each for each in args]
        return self._counted(func, formula, func, args, kwargs)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that an operator calls, so that its work counts. The operator runs outside the mode."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return counted

    def _counted(self, func: Any, formula: Callable[..., int] | None, name: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        if formula is not None or _may_be_much(func):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        if not isinstance(func, HigherOrderOperator):
            self._functions.note(func, (args, kwargs), output)
        if _is_in_backward() and torch.is_grad_enabled():
            return output
        if formula is not None and not _has_no_shape(args):
            self.flops += int(formula(*args, **kwargs, out_val=output))
        elif formula is not None or _may_be_much(func):
            self._operators.add(str(name).replace(".", "::", 1))
        return output


def _has_no_shape(args: Any) -> bool:
    """Returns whether an operand is a nested tensor of the strided layout, whose sizes cannot be queried."""
    return any(isinstance(each, torch.Tensor) and each.is_nested and each.layout is torch.strided for each in args)


def _may_be_much(func: Any) -> bool:
    """Returns whether an operator without a formula may work as much as those that have one."""
    if isinstance(func, HigherOrderOperator):
        return str(func.name()).startswith("triton_kernel")
    if func.namespace == "aten":
        return func._overloadpacket.__name__ in _WITHOUT_FORMULA
    return func.namespace not in _WITHOUT_WORK
