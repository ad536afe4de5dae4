"""The real numbers behind fake tensors, where they are known.

A fake tensor that came from real numbers, or was filled with one, keeps them beside it while they are few or whole
numbers. Results of such tensors are computed as well. Memory into which an operator writes unknown numbers is unknown
from then on, in all tensors that share it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_KNOWN = "_foreseen_known"
_MOST_KNOWN_NUMBERS, _MOST_KNOWN_FRACTIONS = 2**23, 2**12
# Operators whose results follow from shapes and plain arguments.
_FILLS = re.compile(r"(new_)?(zeros|ones|full)(_like)?|arange|eye|linspace|scalar_tensor")
# More gathered numbers are not copied for each rank.
_MOST_GATHERED = 2**20
# Marks real memory whose numbers are no longer those of the fake one.
_OVERWRITTEN = "_foreseen_overwritten"


def is_known(fake: torch.Tensor) -> bool:
    """Returns whether a fake tensor has its numbers beside it."""
    return _KNOWN in vars(fake)


def known_numbers(fake: torch.Tensor) -> torch.Tensor | None:
    """Returns the real tensor behind a fake one; None if it is not known."""
    found: torch.Tensor | None = vars(fake).get(_KNOWN)
    if found is not None and hasattr(found.untyped_storage(), _OVERWRITTEN):
        return None
    return found


def keep(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Keeps the real numbers of a fake tensor, unless they are too many."""
    if _are_few(real):
        vars(fake)[_KNOWN] = real


def _are_few(tensor: torch.Tensor) -> bool:
    has_fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_KNOWN_FRACTIONS if has_fractions else _MOST_KNOWN_NUMBERS)


def follow(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], out: Any) -> None:
    """Computes the numbers of a result if those of its inputs are known, or forgets those that it overwrites."""
    if _is_filled(func._opname):
        _fill(func, args, kwargs, out)
        return
    if not tensors:
        return
    for each in tensors:
        if not is_known(each):
            if func._schema.is_mutable:
                _forget_written(func, args, kwargs)
            return
    if torch.Tag.nondeterministic_seeded in func.tags:
        _forget_written(func, args, kwargs)
        return
    real = real_of((args, kwargs))
    if real is None:
        _forget_written(func, args, kwargs)
        return
    result = func(*real[0], **real[1])
    for fake, number in zip(leaves((out,)), leaves((result,)), strict=True):
        if isinstance(fake, FakeTensor) and isinstance(number, torch.Tensor):
            keep(fake, number)


@functools.cache
def _is_filled(operator: str) -> bool:
    return _FILLS.fullmatch(operator) is not None


def _fill(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if isinstance(out, FakeTensor) and "out" not in kwargs and _are_few(out):
        given = mapped((args, kwargs), torch.Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype))
        args, kwargs = mapped(given, torch.device, lambda _: torch.device("cpu"))
        vars(out)[_KNOWN] = func(*args, **kwargs)


def gather(gathered: torch.Tensor, given: torch.Tensor) -> None:
    """Lets the numbers of what a rank gathers be known if those that it gives are, as if all ranks had the same."""
    known = known_numbers(given) if isinstance(given, FakeTensor) else given
    times, rest = divmod(gathered.numel(), max(1, given.numel()))
    forget(gathered)
    if known is not None and not rest and gathered.numel() <= _MOST_GATHERED:
        keep(gathered, known.detach().reshape(-1).repeat(times).reshape(gathered.shape))


def forget(fake: torch.Tensor) -> None:
    """Forgets the numbers of a fake tensor, and of all others that share its memory."""
    real = vars(fake).pop(_KNOWN, None)
    if real is not None:
        setattr(real.untyped_storage(), _OVERWRITTEN, True)


def _forget_written(func: Any, args: Any, kwargs: Any) -> None:
    """Forgets the numbers of tensors that an operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for each in leaves((value,)):
                if isinstance(each, torch.Tensor):
                    forget(each)


def real_of(value: Any) -> Any:
    """Returns arguments with the known numbers in the place of fake tensors; None if some are unknown."""
    missing = False

    def real(each: torch.Tensor) -> torch.Tensor:
        nonlocal missing
        if not isinstance(each, FakeTensor):
            return each
        found = known_numbers(each)
        missing |= found is None
        return each if found is None else found

    found = mapped(value, torch.Tensor, real)
    return None if missing else mapped(found, torch.device, lambda _: torch.device("cpu"))


def leaves(values: Sequence[Any]) -> list[Any]:
    """Returns all values in lists and tuples."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += leaves(value)
        else:
            found.append(value)
    return found


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns a value with everything of a kind in its lists, tuples and dictionaries replaced."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(each, kind, change) for each in value)
    if type(value) is dict:
        return {name: mapped(each, kind, change) for name, each in value.items()}
    return value
