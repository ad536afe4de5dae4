"""The mode under which the program runs: what is fake, what is real, and who notes it.

It sees every operator of torch, below autograd. The rules:

* A tensor on the pretended device is fake. So are parameters (`torch.nn.Parameter`), from the moment in which they are
  made, and large blocks of the host that DeepSpeed's engine asks for. All results of fake tensors are fake.
* Every other tensor is real: data sets, batches, masks and whatever else a program computes on the host.
* A program that looks at its tokens or masks sees true values (`known_numbers`). A number that is not known is invented
  (`Asks`).

Shapes come from torch's `FakeTensorMode` the first time, and from `output_memo` afterwards.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from zerotune.trial_lib.messages.foreseen_run import ForeseeOrder
from zerotune.trial_lib.plan.simulate import known_numbers, output_memo, pretended_device
from zerotune.trial_lib.plan.simulate.asks import LIKELY, Asks, CannotForeseeError
from zerotune.trial_lib.plan.simulate.known_numbers import leaves, mapped
from zerotune.trial_lib.plan.simulate.logs import INPUT, PARAMETER, MemoryLog, OperationLog, place_in_program
from zerotune.trial_lib.plan.simulate.pretended_device import (
    BACKWARD,
    FORWARD,
    note_made,
    note_transfer,
    pretend_collective,
)
from zerotune.trial_lib.rank.patching import Change, Patch, Table, around

# A block of the host that is at least as large is no data, if the engine asks for it. At stage 3 a rank's share of one
# parameter may be that small.
_LARGE_BYTES = 2**12
_OWN = f"{os.sep}trial_lib{os.sep}"
# What calls the backward pass (torch/autograd/graph.py).
_RUNS_BACKWARD = "_engine_run_backward"
_SCORES_OF_SAMPLES = 3  # positions, samples, labels
_ASKS = {"_local_scalar_dense": "item", "equal": "equal", "is_nonzero": "item", "allclose": "equal"}
_FOLLOW_FROM_NUMBERS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_OF_DEEPSPEED = ("deepspeed", "autosp", "autotp")  # the namespaces of operators that it writes in Python
# Torch's own code asks for a tensor's device by this operator.
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")
# Arguments that are no real tensors, and hold none.
_PLAIN = {FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class _Operator(NamedTuple):
    """What is asked of an operator at each of its calls. Torch works some of it out anew each time."""

    func: Any  # the operator. Its number is the key, so it has to stay.
    is_collective: bool  # whether it sends to other ranks
    is_ask: bool  # whether it asks for a number
    is_view: bool  # whether its results share the memory of its argument
    makes_views: bool  # whether it is a view and leaves its argument as it is
    repeats: bool  # whether its outputs follow from the shapes of its inputs
    fills: bool  # whether the numbers of its results follow from plain arguments
    is_of_processor: bool  # whether a processor takes memory beside its results
    body: Callable[..., Any] | None  # DeepSpeed's own Python around collectives, which a fake result would hide

    @classmethod
    def of(cls, func: Any) -> "_Operator":
        return cls(
            func,
            func.namespace == "c10d",
            func._opname in _ASKS,
            func.is_view,
            func.is_view and torch.Tag.inplace_view not in func.tags,
            output_memo.can_repeat(func),
            known_numbers.fills(func),
            func._opname in (FORWARD, BACKWARD),
            getattr(OPDEFS.get(func._schema.name), "_init_fn", None) if func.namespace in _OF_DEEPSPEED else None,
        )


def _is_in_node_of_torch() -> bool:
    if torch._C._current_autograd_node() is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _OWN in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == _RUNS_BACKWARD


class FakeTensors(TorchDispatchMode):
    """The mode. Enter it once, before the program runs. Tables of patches are installed for it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, order: ForeseeOrder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order = order
        self.memory, self.operations, self.asks = MemoryLog(), OperationLog(), Asks()
        self.notes: set[str] = set()  # what a plan of this run says of its kernels
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.in_engine = False  # whether DeepSpeed's own code runs
        # Called with an error in the backward pass of torch's own operators.
        self.ends_with: Callable[[BaseException], None] = lambda error: None
        self._maker = output_memo.Maker(self.fakes)
        self._memo: dict[Any, output_memo.Entry] = {}
        self._operators: dict[int, _Operator] = {}
        self._is_fake: dict[Any, bool] = {}
        self._refused: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0]._fake_device
        kwargs = kwargs or {}
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs, is_pinned = pretended_device.as_written(kwargs)
            if is_pinned:
                out = self.__torch_dispatch__(func, types, args, kwargs)
                self.memory.pinned(out)
                return out
        if types and (self._is_fake[types] if types in self._is_fake else self._has_fake(types)):
            if types in self._refused:
                return NotImplemented
            # A default device is a mode of Python's calls (torch.utils._device), which would see each look at a tensor.
            try:
                with torch._C.DisableTorchFunction():
                    return self._fake(func, types, args, kwargs)
            except Exception as error:
                if _is_in_node_of_torch():
                    # Torch would abort the process.
                    self.ends_with(error)
                raise
        if types:
            return func(*args, **kwargs)
        return self._without_fakes(func, types, args, kwargs)

    def _has_fake(self, types: Any) -> bool:
        # Whether some classes have a fake tensor's, and keeps that. A run has a hundred thousand operators.
        found = self._is_fake[types] = any(issubclass(kind, FakeTensor) for kind in types)
        if found and any(kind is not FakeTensor and not issubclass(kind, torch.nn.Parameter) for kind in types):
            self._refused.add(types)
        return found

    def _without_fakes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None:
            if device.type == pretended_device.NAME:
                return self._fake(func, types, args, kwargs)
            if self.in_engine and device.type == "cpu" and self._is_large_block(func, args, kwargs):
                return self._fake(func, types, args, kwargs)
        if func.namespace == "c10d":
            note_transfer(func, args, self.operations)
        return func(*args, **kwargs)

    def _is_large_block(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not args or not isinstance(args[0], (list, tuple, torch.Size)):
            return False
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        numbers = dtype.itemsize
        for length in args[0]:
            if not isinstance(length, int):
                return False
            numbers *= length
        return bool(dtype.is_floating_point) and numbers >= _LARGE_BYTES

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = _Operator.of(func)
        # Operators without a result in memory of its own.
        if operator.is_collective:
            return pretend_collective(func, args, kwargs, self.operations, self.memory)
        if operator.is_ask:
            return self._ask(func, args, kwargs)
        if operator.body is not None:
            with self:
                return operator.body(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.type == "meta":
            return self._shape_only(func, args, kwargs)
        given = args
        args, kwargs = self._all_fake(func, args, kwargs)
        if operator.makes_views and type(args[0]) is FakeTensor:
            out = self._maker.views(func, args[0], args[1:], kwargs)
            if known_numbers.is_known(args[0]):
                known_numbers.follow(func, args, kwargs, args[:1], out)
            return out
        # The result of an equal call is made again, and any other is worked out.
        tensors: list[torch.Tensor] = []
        key = None
        repeats = operator.repeats or output_memo.has_places(func, args)
        try:
            key = output_memo.key_of(func, args, kwargs, tensors, operator.is_view)
        except output_memo.UnknownArgumentError:
            repeats = False
        entry = self._memo.get(key) if repeats else None
        made: list[torch.Tensor] = []
        if entry is None:
            out = self._worked_out(func, types, args, kwargs, tensors, made, key if repeats else None)
        else:
            out = self._maker.again(entry, tensors, made)
            if entry.cost is not None:
                self.operations.note(entry.cost)
        # Its memory, and the numbers in it.
        is_moved_data = args is not given and func._opname == "_to_copy"
        if operator.is_of_processor:
            note_made(func._opname, args, made, self.memory)
        else:
            for each in made:
                (self.memory.made_from_data if is_moved_data else self.memory.made)(each)
        if operator.fills:
            known_numbers.fill(func, args, kwargs, out)
        else:
            known_numbers.follow(func, args, kwargs, tensors, out)
        return out

    def _shape_only(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        # The tensor on torch's meta device that the code asks for. It has a shape, and is nowhere.
        shaped = self.fakes.dispatch(func, (FakeTensor,), args, {**kwargs, "device": torch.device("cpu")})
        assert isinstance(shaped, torch.Tensor)
        return torch.empty_strided(shaped.shape, shaped.stride(), dtype=shaped.dtype, device="meta")

    def _worked_out(
        self,
        func: Any,
        types: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        made: list[torch.Tensor],
        key: Any,
    ) -> Any:
        if key is not None:
            entry = self._by_shape(func, args, kwargs, tensors)
            if entry is not None:
                self._memo[key] = entry
                if entry.cost is not None:
                    self.operations.note(entry.cost)
                return self._maker.again(entry, tensors, made)
        try:
            out = self._by_known(func, args, kwargs) if key is None else None
            if out is None:
                out = self.fakes.dispatch(func, (FakeTensor,), args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self._of_known_shape(func, args)
            if out is None:
                raise CannotForeseeError(
                    f"The shape of {func._opname}'s result depends on numbers that only a real run has, at "
                    f"{place_in_program()}."
                ) from None
        except (UnsupportedOperatorException, NotImplementedError):
            out = self._of_known_shape(func, args)
            if out is None:
                raise CannotForeseeError(
                    f"{func} has no fake implementation, at {place_in_program()}. A kernel of your own can have one "
                    "(torch.library.register_fake)."
                ) from None
        if key is None:
            tensors = [each for each in leaves((*args, *kwargs.values())) if isinstance(each, torch.Tensor)]
        addresses = {each.untyped_storage()._cdata for each in tensors}
        new = [
            each
            for each in leaves((out,))
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in addresses
        ]
        cost = self.operations.cost(func, args, kwargs, tensors, new, out)
        if cost is not None:
            self.operations.note(cost)
        entry = None if key is None else output_memo.entry_of(out, tensors, None, cost)
        if entry is None:
            made += new
            return out
        self._memo[key] = entry
        # Torch refers to its own result weakly, and a parameter with such a reference cannot change its device.
        return self._maker.again(entry, tensors, made)

    def _by_shape(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """The entry of a call by torch's own kernels for shapes, which are faster than its fake mode.

        None for a call that needs the mode: one that names a device, has inputs in two places, or has no such kernel.
        """
        devices = {each._fake_device for each in tensors if each.dim()}  # type: ignore[attr-defined]
        if len(devices) != 1 or "device" in kwargs or "out" in func._overloadname or not _has_shape_kernel(func):
            return None
        bare = {id(each): self._maker.bare(each) for each in tensors}
        shaped_args, shaped = mapped((args, kwargs), torch.Tensor, lambda each: bare[id(each)])
        try:
            out = func(*shaped_args, **shaped)
        except (NotImplementedError, RuntimeError):
            return None
        sources = list(bare.values())
        entry = output_memo.entry_of(out, sources, next(iter(devices)), None)
        if entry is None:
            return None
        new = [
            leaf for leaf, output in zip(leaves((out,)), entry.outputs, strict=True) if output.how == output_memo.NEW
        ]
        unique = {id(each): index for index, each in enumerate(tensors)}
        positions = [unique[address] for address in bare]
        moved = tuple(each._replace(source=positions[each.source]) for each in entry.outputs)
        cost = self.operations.cost(func, shaped_args, shaped, tensors, new, out)
        return output_memo.Entry(moved, entry.container, cost)

    def _by_known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose shape follows from numbers; None for others, or if they are unknown.

        Torch's fake mode would refuse it, which takes longer.
        """
        if _FOLLOW_FROM_NUMBERS.isdisjoint(func.tags):
            return None
        real = known_numbers.real_of((args, kwargs))
        if real is None:
            return None
        result = known_numbers.used_in(func, real)
        return mapped(result, torch.Tensor, lambda each: self.to_fake(each, _device_in(args, kwargs)))

    def _of_known_shape(self, func: Any, args: Any) -> Any:
        # Unknown numbers whose shape follows from a known mask or from known lengths; None for others.
        if func is torch.ops.aten.index.Tensor:
            places = known_numbers.places_of(args[1], self.asks.chooses_all)
            if places is None:
                return None
            device, as_they_are = args[0].device, (FakeTensor, type(None))
            where = [each if isinstance(each, as_they_are) else self.to_fake(each, device) for each in places]
            return self.fakes.dispatch(func, (FakeTensor,), (args[0], where), {})
        if func is torch.ops.aten.masked_select.default and (mask := known_numbers.known_numbers(args[1])) is not None:
            known_numbers.used(mask)
            shape = torch.broadcast_shapes(args[0].shape, mask.shape)
            count = int(mask.broadcast_to(shape).sum())
            return self._new(args[0], [count])
        if func._opname == "_ctc_loss" and args[0].dim() == _SCORES_OF_SAMPLES:
            longest = known_numbers.largest(args[3])
            if longest is not None:
                # aten/src/ATen/native/cuda/LossCTC.cu: a blank stands around each label.
                positions, samples = args[0].shape[:2]
                return self._new(args[0], [samples]), self._new(args[0], [samples, positions, 2 * longest + 1])
        if func._opname == "_ctc_loss_backward":
            return self._new(args[1], list(args[1].shape))
        return None

    def _new(self, tensor: torch.Tensor, shape: Sequence[int]) -> Any:
        return self.fakes.dispatch(torch.ops.aten.new_empty.default, (FakeTensor,), (tensor, shape), {})

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        real = known_numbers.real_of((args, kwargs))
        if real is not None:
            return known_numbers.used_in(func, real)
        question = _ASKS[func._opname]
        dtype = torch.bool if question == "equal" else args[0].dtype
        return self.asks.answer(question, dtype, is_likely=hasattr(args[0], LIKELY))

    def _all_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        for each in args:
            kind = type(each)
            if kind not in _PLAIN and not (kind is list and each and type(each[0]) is int):
                break
        else:
            if not kwargs or all(type(each) in _PLAIN for each in kwargs.values()):
                return args, kwargs
        is_mixed = False
        device = _CPU
        for each in leaves((*args, *kwargs.values())):
            if type(each) is FakeTensor:
                if each._fake_device.type != "cpu":
                    device = each._fake_device
            elif isinstance(each, torch.Tensor):
                is_mixed = True
        if not is_mixed:
            return args, kwargs
        # A copy goes from one place to another, and other operators have all their inputs in one.
        goes = func._opname in ("copy_", "_foreach_copy_", "_to_copy")

        def fake(each: torch.Tensor) -> torch.Tensor:
            return each if isinstance(each, FakeTensor) else self.to_fake(each, _CPU if goes else device)

        return mapped((args, kwargs), torch.Tensor, fake)

    def to_fake(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor with the shape of a real one, which keeps its numbers if they may matter."""
        fake = self._maker.new(real.shape, real.stride(), real.dtype, device)
        if device.type == pretended_device.NAME:
            self.memory.made(fake, INPUT)
            self.operations.moved_to_device(fake)
        known_numbers.keep(fake, real)
        return fake

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of the host, such as the weights of a checkpoint."""
        fake = self._maker.fake(torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.device("cpu"))
        self.memory.made(fake, PARAMETER)
        return fake

    def parameter(self, real: torch.Tensor) -> torch.Tensor:
        fake = self._maker.new(real.shape, real.stride(), real.dtype, real.device)
        self.memory.made(fake, PARAMETER)
        return fake


def _has_shape_kernel(func: Any) -> bool:
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "Meta")


def _device_in(args: Any, kwargs: Any) -> torch.device:
    for each in leaves((*args, *kwargs.values())):
        if isinstance(each, FakeTensor) and each.device.type == pretended_device.NAME:
            return each.device
    return torch.device("cpu")


# What makes parameters fake, and what torch does with them and with their hooks.


def _new_parameter(original: Any, mode: FakeTensors) -> Any:
    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, FakeTensor) and issubclass(type(data), torch.nn.Parameter):
            # Of a library's own class already. A module that moves asks for it once more.
            return data
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
            data = mode.parameter(data)
        return original(cls, data, requires_grad)

    return staticmethod(new)


def _deep_copied(original: Any, parameter: Any, memo: dict[int, Any]) -> Any:
    if type(parameter) is not FakeTensor or not isinstance(parameter, torch.nn.Parameter):
        return original(parameter, memo)
    if id(parameter) not in memo:
        memo[id(parameter)] = torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)
    return memo[id(parameter)]


def _ending(register: Any, mode: FakeTensors) -> Any:
    @functools.wraps(register)
    def register_hook(self: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(hook)
        def watched(*inputs: Any) -> Any:
            try:
                return hook(*inputs)
            except Exception as error:
                mode.ends_with(error)
                raise

        return register(self, watched, *args, **kwargs)

    return register_hook


_HOOKS = "An error in a hook of the backward pass ends the run. Torch would abort the process."
PATCHES: Table = (
    Patch("torch", "nn.Parameter.__new__", "Each new parameter is fake, so no model takes memory.", _new_parameter),
    Patch(
        "torch._subclasses.fake_tensor",
        "FakeTensor.__deepcopy__",
        "What DeepSpeed has attached to a parameter is no part of its copy.",
        around(_deep_copied),
    ),
    Change(
        "torch._subclasses.fake_tensor",
        "FakeTensorMode.__deepcopy__",
        "A copy of a fake tensor, as of a layer that a model repeats, belongs to the same mode.",
        lambda module, mode: setattr(module.FakeTensorMode, "__deepcopy__", lambda fakes, memo: fakes),
    ),
    Patch("torch", "Tensor.register_hook Tensor.register_post_accumulate_grad_hook", _HOOKS, _ending),
    Patch("torch", "nn.Module.register_full_backward_hook nn.Module.register_full_backward_pre_hook", _HOOKS, _ending),
)
