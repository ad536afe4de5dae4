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

# What `isfinite` or `isnan` has made, until somebody writes into it: the version of the tensor, and its answer.
_ALIKE = "_foreseen_alike"
# The answers of a healthy training. Masked scores have infinite numbers in a real run, and none here.
_ANSWERS = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
# Longer masks choose nothing.
_MOST_ALIKE = 2**20
_MAKERS = ("tensor", "as_tensor", "asarray")
_MAY_HAVE_FAKES = (FakeTensor, list, tuple)


def install() -> None:
    """Replaces the functions. Call it once, before the program runs."""
    shown: Any = torch.Tensor.__format__

    def format_(tensor: torch.Tensor, text: str) -> str:
        """Replaces `Tensor.__format__`, which shows the number of a tensor that is not fake."""
        is_number = isinstance(tensor, FakeTensor) and tensor.dim() == 0 and text
        return format(tensor.item(), text) if is_number else shown(tensor, text)

    FakeTensor.__format__ = format_  # type: ignore[method-assign]
    for name in (*_ANSWERS, "all"):
        answering = functools.partial(_alike, _ANSWERS[name]) if name in _ANSWERS else _all
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, answering(original))
        setattr(torch.Tensor, name, answering(getattr(torch.Tensor, name)))
    # By which `torch.distributions` checks its parameters.
    if hasattr(torch, "_is_all_true"):
        stand_in("_is_all_true", torch._is_all_true, _all(torch._is_all_true))
    for name in _MAKERS:
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, _of_numbers(original))
    torch.amp.GradScaler.get_scale = _first_scale  # type: ignore[method-assign, assignment]
    torch.Tensor.new_tensor = _of_numbers(torch.Tensor.new_tensor, place=1)  # type: ignore[method-assign]


def _first_scale(scaler: Any) -> float:
    """Replaces `GradScaler.get_scale`. A healthy training goes on with the scale that it begins with."""
    return float(scaler._init_scale) if scaler.is_enabled() else 1.0


def _alike(answer: bool, original: Any) -> Callable[..., Any]:
    """Returns a function whose answer is the same for all numbers.

    Args:
        answer: for each number.
        original: asks for each number.
    """

    @functools.wraps(original)
    def ask(*args: Any, **kwargs: Any) -> Any:
        return _as_alike(original(*args, **kwargs), answer)

    return ask


def _all(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.all`."""
        found = original(*args, **kwargs)
        asked = args[0] if args else kwargs.get("input")
        version, answer = getattr(asked, _ALIKE, (None, None))
        if version is None:
            if _is_open(found):
                setattr(found, LIKELY, True)
        elif version == _version(asked):
            return _as_alike(found, answer)
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
    return [_number_of(each) for each in data]


def _number_of(element: Any) -> Any:
    if isinstance(element, FakeTensor) and element.numel() == 1:
        # Torch takes the type of the whole from its numbers.
        return torch.full((), element.item(), dtype=element.dtype, device="cpu")
    return _numbers_of(element)


def _as_alike(found: Any, answer: Any) -> Any:
    if _is_open(found):
        setattr(found, _ALIKE, (_version(found), answer))
        if found.numel() <= _MOST_ALIKE:
            known_numbers.keep(found, torch.full(found.shape, answer, dtype=torch.bool, device="cpu"))
    return found


def _is_open(found: Any) -> bool:
    return isinstance(found, FakeTensor) and not known_numbers.is_known(found)


def _version(tensor: Any) -> int:
    return int(tensor._version) if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else -1
