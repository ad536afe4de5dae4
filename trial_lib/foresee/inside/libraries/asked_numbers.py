"""Numbers of a tensor that programs ask in ways of their own: in a text, and whether they are finite, or none."""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import known_numbers
from trial_lib.intercept.stand_in import stand_in_for_scripts

# What `isfinite` has made, until somebody writes into it: the version of the tensor.
_ALL_TRUE = "_foreseen_all_true"


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
        return _all_true(found) if getattr(asked, _ALL_TRUE, None) == _version(asked) else found

    return all_


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
