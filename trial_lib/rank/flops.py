"""Model FLOPs of one micro-batch, counted on the real model while it trains."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from zerotune.trial_lib.rank.loader_batches import tensors_in
from zerotune.trial_lib.rank.memory import names
from zerotune.trial_lib.rank.torch_functions import eagerly

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class OpaqueFunctions:
    """Records functions that return memory that no operator has written, while this is entered."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of those that were called
        # Addresses of allocated memory that no operator has written to.
        self._unwritten: set[int] = set()

    def note(self, operator: Any, args: Any, output: Any) -> None:
        if operator.is_view:
            return
        # A collective writes to its arguments. So may an operator of another library.
        written = output if operator.namespace == "aten" else (args, output)
        addresses = {address for each in tree_leaves(written) if (address := _address(each))}
        if operator.namespace == "aten" and operator._overloadpacket.__name__ in _EMPTY:
            self._unwritten |= addresses
        else:
            self._unwritten -= addresses

    def __enter__(self) -> "OpaqueFunctions":
        self._apply = apply = torch.autograd.Function.__dict__["apply"]

        def noted(function: type, *args: Any, **kwargs: Any) -> Any:
            output = apply.__get__(None, function)(*args, **kwargs)
            if any(_address(each) in self._unwritten for each in tree_leaves(output)):
                self.names.add(f"{function.__module__}.{function.__qualname__}")
            return output

        torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        self._unwritten.clear()


def _address(value: Any) -> int:
    # The address of a tensor's data; 0 for anything else, and for a tensor without data of its own.
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested or value.layout is not torch.strided:
        return 0
    return int(value.untyped_storage().data_ptr())


# Products by groups, as in a mixture of experts: each group of rows with its own matrix


def grouped_products() -> dict[Any, Callable[..., int]]:
    """Returns the formulas by operator, as `torch.utils.flop_counter` calls them."""
    found: dict[Any, Callable[..., int]] = {}
    for name in ("_grouped_mm", "_scaled_grouped_mm"):
        if hasattr(torch.ops.aten, name):
            found[getattr(torch.ops.aten, name)] = _flops
    # What transformers computes where torch has no kernel of its own (transformers/integrations/moe.py). Its operators
    # exist from the import of that module on. Until transformers 5.6 the backward pass is none, but plain products.
    twice: Callable[..., int] = lambda left, right, *_, **__: 2 * _flops(left, right)  # noqa: E731
    for name, flops in (("grouped_mm_fallback", _flops), ("grouped_mm_fallback_backward", twice)):
        if hasattr(torch.ops.transformers, name):
            found[getattr(torch.ops.transformers, name)] = flops
    return found


def _flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    # Every row of the left side belongs to one group. A side of two dimensions has its groups one after the other, and
    # one of three has them in its first dimension.
    flops = 2 * left.numel() * right.shape[-1]
    # Groups of columns: each matrix of the left side meets its own columns alone.
    return flops // left.shape[0] if left.dim() > right.dim() else flops


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


def _forward_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # The FLOPs of attention's two matrix products. A causal mask is not subtracted (PaLM, appendix B).
    batch, heads, queries, depth = query.shape
    return int(2 * batch * heads * queries * key.shape[2] * (depth + value.shape[3]))


def _backward_attention(_gradient: Any, *forward: Any, **named: Any) -> int:
    # Twice the forward pass. torch's own formula adds the scores that a fused kernel computes again. Recomputation is
    # work of the implementation, not of the model.
    return 2 * _forward_attention(*forward, **named)


def _formulas() -> dict[Any, Callable[..., int]]:
    formulas: dict[Any, Callable[..., int]] = {**flop_registry, **grouped_products()}
    for name in _ATTENTION:
        if hasattr(aten, name):
            formulas[getattr(aten, name)] = _forward_attention
            formulas[getattr(aten, f"{name}_backward")] = _backward_attention
    higher_order = torch.ops.higher_order
    if hasattr(higher_order, "flex_attention"):
        formulas[higher_order.flex_attention] = _forward_attention
        formulas[higher_order.flex_attention_backward] = functools.partial(_backward_attention, None)
    return formulas


def _queries() -> frozenset[Any]:
    packets = (getattr(aten, name) for name in _QUERIES if hasattr(aten, name))
    return frozenset(packets) | {torch.ops.prim.layout}


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products, convolutions and attention while this is entered.

    The formulas are torch's (`torch.utils.flop_counter`), with attention counted on every kernel, the CPU's included.
    Recomputation under activation checkpointing does not count: it runs during the backward pass with gradients
    enabled. For a higher-order operator without a formula (`cond`, `map`), the operations within it count.
    """

    # Without this, torch raises at each of them.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.dtypes: set[torch.dtype] = set()  # of the operands, recomputation included
        self._depth = 0
        self._operators: set[str] = set()
        self._functions = OpaqueFunctions()
        self._formulas = _formulas()
        self._queries = _queries()

    @property
    def uncounted(self) -> set[str]:
        """Names of operators and functions without a formula, which may have done such work."""
        return self._operators | self._functions.names

    def __enter__(self) -> "FlopCounter":
        # Count once, however often the operators below enter the mode again.
        if not self._depth:
            self._functions.__enter__()
        self._depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if not self._depth:
            self._functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        # Wraps a function that an operator calls, so that its work counts. The operator runs outside the mode.

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
        # The same test for a backward pass as in `torch.utils.checkpoint`.
        if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            return output
        if formula is not None and not _has_no_shape(args):
            self.flops += int(formula(*args, **kwargs, out_val=output))
        elif formula is not None or _may_be_much(func):
            self._operators.add(str(name).replace(".", "::", 1))
        return output


def _has_no_shape(args: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.is_nested and each.layout is torch.strided for each in args)


def _may_be_much(func: Any) -> bool:
    if isinstance(func, HigherOrderOperator):
        return str(func.name()).startswith("triton_kernel")
    if func.namespace == "aten":
        return func._overloadpacket.__name__ in _WITHOUT_FORMULA
    return func.namespace not in _WITHOUT_WORK


class SavedActivations:
    """Counts the bytes of tensors that autograd saves while this is entered. Parameters do not count.

    The count is exact on every device. An allocator's noise on a CPU hides the resident memory of one sample. A storage
    that several operations keep counts once.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.dtypes: set[torch.dtype] = set()  # of all saved tensors, parameters included
        self._storages: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.dtypes.add(tensor.dtype)
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> "SavedActivations":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._storages.clear()


class ModelCounter:
    """Counts the saved activations of the first training micro-batch, and the FLOPs of one on request.

    The two are counted in different micro-batches. Activations are those of the training as it is, and FLOPs only show
    if nothing is compiled.
    """

    def __init__(self, with_activations: bool) -> None:
        self.flops = 0  # of this rank's part of the model, forward and backward
        self.uncounted: set[str] = set()  # names of operators that ran without a formula
        self.activation_bytes = 0  # that a forward pass has saved
        self.formats: set[str] = set()  # of the numbers that were saved, returned or multiplied, such as `bfloat16`
        self.counts_activations = with_activations  # in the next micro-batch
        self.counts_flops = False  # in the next micro-batch
        self._looks_for_more = False
        self._counter: FlopCounter | None = None
        self._entered = contextlib.ExitStack()

    def count_flops(self) -> None:
        """Counts the next micro-batch, which runs as its code is written, without compilation."""
        self.counts_flops = True
        self._looks_for_more = False

    def count_activations_again(self) -> None:
        """Counts each micro-batch from now on, and keeps the largest count."""
        self._looks_for_more = True

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.counts_flops and self._counter is None:
            # Left at the end of the backward pass, so that a loss outside the engine counts too.
            self._begin()
        if not self.counts_activations and not self._looks_for_more:
            return function(*args, **kwargs)
        with SavedActivations() as saved:
            output = function(*args, **kwargs)
        before = self.activation_bytes
        self.activation_bytes = before + saved.bytes if self.counts_activations else max(before, saved.bytes)
        self.formats |= names({*saved.dtypes, *(tensor.dtype for tensor in tensors_in(output))})
        return output

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            self.stop()

    def stop(self) -> None:
        self.counts_activations = False
        if self._counter is not None:
            self._end()

    def _begin(self) -> None:
        try:
            self._entered.enter_context(eagerly())
        except RuntimeError:
            # The engine is called within a compiled function, in which nothing can be counted.
            self.counts_flops = False
            return
        self._counter = self._entered.enter_context(FlopCounter())

    def _end(self) -> None:
        assert self._counter is not None
        self._entered.close()
        self.flops += self._counter.flops
        self.formats |= names(self._counter.dtypes)
        self.uncounted |= self._counter.uncounted
        self._counter, self.counts_flops = None, False


class StageCounter(ModelCounter):
    """Counts the first forward and the first backward pass of a pipeline stage.

    The schedule runs other micro-batches between the two. The last stage computes the loss in its forward pass.
    """

    def __init__(self, with_activations: bool) -> None:
        super().__init__(with_activations)
        self._counts_backward = False

    def count_flops(self) -> None:
        super().count_flops()
        self._counts_backward = True

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(function, *args, **kwargs)
        finally:
            self.stop()

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._counts_backward:
            return function(*args, **kwargs)
        self._counts_backward = False
        self._begin()
        return super().backward(function, *args, **kwargs)


# Whether the FLOPs that ranks have counted are shares of one figure

# A program's work differs by chance, or by its data, for samples of one size. It may skip layers, or predict fewer
# tokens. If a rank's backward pass is not counted, the rank has a third of the work.
_MOST_APART = 2.0
# The largest exponent by which work grows with the size of a sample.
_POWER = 2


@dataclass(frozen=True)
class FlopShare:
    """The count of one rank for a sample."""

    flops: float  # of the sample, on average
    elements: float  # numbers in its inputs, on average


def are_shares_of_one(shares: Sequence[FlopShare]) -> bool:
    """Whether the sizes of the samples explain every difference between ranks with the same part of the model."""
    by_size = sorted(shares, key=lambda share: share.elements)
    return all(_is_explained(smaller, larger) for smaller, larger in combinations(by_size, 2))


def _is_explained(smaller: FlopShare, larger: FlopShare) -> bool:
    growth = larger.elements / smaller.elements if smaller.elements else 1.0
    return smaller.flops / _MOST_APART <= larger.flops <= smaller.flops * growth**_POWER * _MOST_APART


class DirectCalls:
    """Calls `note` before each forward pass of a model, compiled or not, with its arguments, until `remove`.

    If a model is compiled in place (`model.compile()`, `engine.compile()`), its hooks are compiled too. A hook then
    breaks the graph, or stops a program that wants a single graph. So there the call itself is recorded, before the
    compiled code.
    """

    def __init__(self, module: torch.nn.Module, note: Callable[[Any], None]) -> None:
        self._module = module
        self._note = note
        self._is_on = True
        self._begin()
        self._compile = module.compile
        # This bypasses `__setattr__`, because a model that `torch.compile` has wrapped forwards what is set.
        vars(module)["compile"] = self._compiling

    def remove(self) -> None:
        if self._is_on:
            self._is_on = False
            self._end()
            vars(self._module).pop("compile", None)

    def _begin(self) -> None:
        self._called = vars(self._module).get("_compiled_call_impl")
        self._hook = None
        if self._called is None:
            self._hook = self._module.register_forward_pre_hook(self._forward, with_kwargs=True)
        else:
            vars(self._module)["_compiled_call_impl"] = self._call

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        else:
            vars(self._module)["_compiled_call_impl"] = self._called

    def _compiling(self, *args: Any, **kwargs: Any) -> None:
        self._end()
        try:
            self._compile(*args, **kwargs)
        finally:
            self._begin()

    def _forward(self, _module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._note([args, kwargs])

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        assert self._called is not None
        self._note([args, kwargs])
        return self._called(*args, **kwargs)
