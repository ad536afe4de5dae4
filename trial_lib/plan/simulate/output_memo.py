"""Remembers what operators return, so that one with inputs of the same shapes need not be worked out again.

Layers of a model repeat, and torch's own way of finding the shape of an output takes far longer than a look into a
dictionary. An entry holds, for each output, its shape and whether it is new, a view of an input, or an input itself.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zerotune.trial_lib.plan.simulate.known_numbers import MASKS

NEW, VIEW, SAME, PLAIN = range(4)
# Torch's own. A run replaces both for programs.
_make_subclass: Any = torch.Tensor._make_subclass
_GENERATOR = torch.Generator
_META = torch.device("meta")
# Arguments of views: numbers, and lists of numbers.
_OF_VIEWS = {int, bool, type(None), list}
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_INDEX = torch.ops.aten.index.Tensor
_SIMPLE = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Output(NamedTuple):
    """One output: how it is made, of which input, and its shape."""

    how: int
    source: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    offset: int = 0
    plain: Any = None


class Entry(NamedTuple):
    outputs: tuple[Output, ...]  # in order
    container: Callable[[Any], Any] | None  # makes the value of the call from them; None for a single output
    cost: Any  # of the call, for the log of operations; None for a call that moves nothing


class UnknownArgumentError(Exception):
    """An argument of a kind that no key can hold."""


def can_repeat(func: Any) -> bool:
    """Whether the outputs of an operator follow from the shapes of its inputs."""
    return not any(tag in _DYNAMIC for tag in func.tags) and "resize" not in func._opname


def has_places(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator takes what is at places, and not what a mask chooses: its shape follows then."""
    return func is _INDEX and all(each is None or each.dtype not in MASKS for each in args[1])


def key_of(func: Any, args: Sequence[Any], kwargs: Any, tensors: list[torch.Tensor], with_offset: bool) -> Any:
    """The key of a call, whose tensors are collected in order. `with_offset`: the place within a storage matters."""
    # Torch's operators stay, and hash by a function of Python's.
    parts: list[Any] = [id(func)]
    _add(args, parts, tensors, with_offset)
    for name, value in kwargs.items():
        parts.append(name)
        _add((value,), parts, tensors, with_offset)
    return tuple(parts)


def _add(values: Sequence[Any], parts: list[Any], tensors: list[torch.Tensor], with_offset: bool) -> None:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            tensors.append(value)
            parts.append(value.shape)
            parts.append(value.stride())
            parts.append(value.dtype)
            parts.append(value._fake_device)
            if with_offset:
                parts.append(value.storage_offset())
        elif kind in _SIMPLE:
            parts.append(kind)
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            _add(value, parts, tensors, with_offset)
        elif kind is _GENERATOR:
            continue
        elif isinstance(value, (bool, int, float, torch.Size)):
            parts.append(kind)
            parts.append(value)
        else:
            raise UnknownArgumentError


def entry_of(out: Any, tensors: Sequence[Any], device: torch.device | None, cost: Any) -> Entry | None:
    """The entry for what a call has returned; None if it cannot be repeated.

    Outputs are on `device`; None for that of each.
    """
    container: Callable[[Any], Any] | None = None
    leaves: Sequence[Any] = (out,)
    if isinstance(out, (list, tuple)):
        if type(out) not in (list, tuple):
            return None
        container, leaves = type(out), out
    addresses = {each.untyped_storage()._cdata: index for index, each in enumerate(tensors)}
    outputs = [_output(leaf, tensors, addresses, device) for leaf in leaves]
    known = tuple(each for each in outputs if each is not None)
    return Entry(known, container, cost) if len(known) == len(outputs) else None


def _output(leaf: Any, tensors: Sequence[Any], addresses: dict[int, int], device: torch.device | None) -> Output | None:
    if not isinstance(leaf, torch.Tensor):
        return Output(PLAIN, plain=leaf) if isinstance(leaf, (int, float, bool, type(None))) else None
    for index, each in enumerate(tensors):
        if leaf is each:
            return Output(SAME, index)
    if leaf.layout != torch.strided or leaf.is_conj() or leaf.is_neg():
        return None
    shape = (tuple(leaf.shape), tuple(map(int, leaf.stride())), leaf.dtype, device or leaf.device)
    source = addresses.get(leaf.untyped_storage()._cdata)
    if source is not None:
        return Output(VIEW, source, *shape, int(leaf.storage_offset()))
    return Output(NEW, 0, *shape)


class Maker:
    """Makes fake tensors, faster than torch's own constructor."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        # The attributes of one that torch has made.
        made = FakeTensor(fakes, torch.empty(0, device="meta"), torch.device("cpu"))
        self._attributes = dict(vars(made))
        # Shape, stride and moved offset of a view. Layers repeat, and torch takes longer to work them out.
        self._views: dict[Any, tuple[Any, Any, int, torch.dtype]] = {}

    def fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """With the shape and the storage of a tensor on torch's meta device."""
        tensor: FakeTensor = _make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        attributes = vars(tensor)
        attributes.update(self._attributes)
        attributes["_fake_device"] = device
        return tensor

    def new(self, shape: Any, stride: Any, dtype: Any, device: torch.device) -> FakeTensor:
        return self.fake(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)

    def bare(self, fake: torch.Tensor) -> torch.Tensor:
        """On torch's meta device, with the shape and the storage of a fake one."""
        meta = torch.empty(0, dtype=fake.dtype, device=_META)
        return meta.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())

    def views(self, func: Any, tensor: FakeTensor, args: Sequence[Any], kwargs: Any) -> Any:
        """The views that an operator takes of its first argument. Such operators have no work of their own."""
        device = tensor._fake_device
        key: Any = None
        if not kwargs and _OF_VIEWS.issuperset(map(type, args)):
            parts = [tuple(each) if type(each) is list else each for each in args]
            key = (id(func), tensor.shape, tensor.stride(), tensor.dtype, *parts)
            known = self._views.get(key)
            if known is not None:
                shape, stride, moved, dtype = known
                meta = torch.empty(0, dtype=dtype, device=_META)
                meta.set_(tensor.untyped_storage(), tensor.storage_offset() + moved, shape, stride)
                return self.fake(meta, device)
        bare = self.bare(tensor)
        out = func(bare, *args, **kwargs)
        if not isinstance(out, torch.Tensor):
            return type(out)(self.fake(each, device) for each in out)
        if key is not None and out.dtype == bare.dtype and not out.is_conj() and not out.is_neg():
            moved = int(out.storage_offset()) - int(bare.storage_offset())
            self._views[key] = (out.shape, out.stride(), moved, out.dtype)
        return self.fake(out, device)

    def again(self, entry: Entry, tensors: list[torch.Tensor], made: list[torch.Tensor]) -> Any:
        """What a call returns, by its entry. `made` gets the outputs with storages of their own."""
        values: list[Any] = []
        for output in entry.outputs:
            how = output.how
            if how == NEW:
                assert output.device is not None
                value = self.new(output.shape, output.stride, output.dtype, output.device)
                made.append(value)
                values.append(value)
            elif how == VIEW:
                assert output.device is not None
                storage = tensors[output.source].untyped_storage()
                meta = torch.empty(0, dtype=output.dtype, device=_META)
                meta.set_(storage, output.offset, output.shape, output.stride)
                values.append(self.fake(meta, output.device))
            else:
                values.append(tensors[output.source] if how == SAME else output.plain)
        return values[0] if entry.container is None else entry.container(values)
