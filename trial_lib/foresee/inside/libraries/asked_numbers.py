"""Numbers of a tensor that programs ask in ways of their own.

They write one into a text, make a tensor of several, or ask whether all fulfil a condition, such as being finite. A
check of a condition succeeds, because a healthy training passes its checks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import known_numbers
from trial_lib.foresee.inside.asks import LIKELY
from trial_lib.intercept.stand_in import stand_in, stand_in_for_scripts

# What `isfinite` has made, until somebody writes into it: the version of the tensor.
_ALL_TRUE = "_foreseen_all_true"
_MAKERS = ("tensor", "as_tensor")
_MAY_HAVE_FAKES = (FakeTensor, list, tuple)


def install() -> None:
    """Replaces the functions. Call it once, before the program runs."""
    shown: Any = torch.Tensor.__format__

    def format_(tensor: torch.Tensor, text: str) -> str:
        """Replaces `Tensor.__format__`, which shows the number of a tensor that is not fake."""
        is_number = isinstance(tensor, FakeTensor) and tensor.dim() == 0 and text
        return format(tensor.item(), text) if is_number else shown(tensor, text)

    FakeTensor.__format__ = format_  # type: ignore[method-assign]
    for name, answering in (("isfinite", _finite), ("isnan", _no_number), ("all", _all)):
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, answering(original))
        setattr(torch.Tensor, name, answering(getattr(torch.Tensor, name)))
    # By which `torch.distributions` checks its parameters.
    if hasattr(torch, "_is_all_true"):
        stand_in("_is_all_true", torch._is_all_true, _all(torch._is_all_true))
    for name in _MAKERS:
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, _of_numbers(original))
    torch.Tensor.new_tensor = _of_numbers(torch.Tensor.new_tensor, place=1)  # type: ignore[method-assign]


def _finite(original: Any) -> Callable[..., Any]:
    def isfinite(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.isfinite`. Losses and gradients of a healthy training are finite.

        So are masked scores here, which may really have infinite ones.
        """
        return _all_true(original(*args, **kwargs))

    return isfinite


def _no_number(original: Any) -> Callable[..., Any]:
    def isnan(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.isnan`. A healthy training has no such numbers, so a mask of them hides nothing."""
        found = original(*args, **kwargs)
        return _known_as(found, torch.zeros) if _is_open(found) else found

    return isnan


def _all(original: Any) -> Callable[..., Any]:
    def all_(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.all`."""
        found = original(*args, **kwargs)
        asked = args[0] if args else kwargs.get("input")
        mark = getattr(asked, _ALL_TRUE, None)
        if mark == _version(asked):
            return _all_true(found)
        if mark is None and _is_open(found):
            setattr(found, LIKELY, True)
        return found

    return all_


def _of_numbers(original: Any, place: int = 0) -> Callable[..., Any]:
    """Returns a function that makes a tensor of numbers, which may be tensors of one number.

    Args:
        original: makes it.
        place: of the numbers among its arguments.
    """

    @functools.wraps(original)
    def tensor(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], _numbers_of(args[place]), *args[place + 1 :])
        elif "data" in kwargs:
            kwargs["data"] = _numbers_of(kwargs["data"])
        return original(*args, **kwargs)

    return tensor


def _numbers_of(data: Any) -> Any:
    """Returns a list with numbers in the place of fake tensors, which torch would read as memory of a device."""
    if type(data) not in (list, tuple) or not any(isinstance(each, _MAY_HAVE_FAKES) for each in data):
        return data
    return [each.item() if isinstance(each, FakeTensor) and each.numel() == 1 else _numbers_of(each) for each in data]


def _all_true(found: Any) -> Any:
    if _is_open(found):
        setattr(found, _ALL_TRUE, _version(found))
        _known_as(found, torch.ones)
    return found


def _is_open(found: Any) -> bool:
    return isinstance(found, FakeTensor) and not known_numbers.is_known(found)


def _known_as(found: torch.Tensor, filled: Callable[..., torch.Tensor]) -> torch.Tensor:
    if found.numel() <= known_numbers.MOST_FILLED:
        known_numbers.keep(found, filled(found.shape, dtype=torch.bool, device="cpu"))
    return found


def _version(tensor: Any) -> int:
    return int(tensor._version) if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else -1
