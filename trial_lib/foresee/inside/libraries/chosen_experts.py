"""Experts that a router chooses, in a foreseen run.

Nobody knows which experts a model would choose for a token. A program that computes them one after another has tensors
of as many rows as an expert has tokens. So each expert gets equally many, which is what losses for balance aim at
(Fedus et al., Switch Transformers, arXiv 2101.03961). A real run has some experts with more.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.foresee.inside import known_numbers
from trial_lib.foresee.inside.asks import Asks
from trial_lib.intercept.stand_in import stand_in_for_scripts

# The best of more are tokens of a vocabulary, or places in an image.
_MOST_EXPERTS = 2**10
# Functions of torch that choose the best along a dimension, and the place of that dimension among their arguments.
_CHOICES = {"topk": 2, "argmax": 1, "max": 1}


def install(asks: Asks) -> None:
    """Replaces the functions. Call it once, before the program runs.

    Args:
        asks: notes what is invented.
    """
    for name, place in _CHOICES.items():
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, _choosing(original, name, place, asks))
        setattr(torch.Tensor, name, _choosing(getattr(torch.Tensor, name), name, place, asks))


def _choosing(original: Any, name: str, place: int, asks: Asks) -> Callable[..., Any]:
    """Returns a function that chooses each equally often.

    Args:
        original: chooses.
        name: of the function.
        place: of the dimension among its arguments.
        asks: notes what is invented.
    """

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        chosen = found if isinstance(found, torch.Tensor) else found[1]
        if isinstance(chosen, FakeTensor) and not known_numbers.is_known(chosen):
            scores = args[0] if args else kwargs["input"]
            dimension = kwargs.get("dim", args[place] if len(args) > place else -1 if name == "topk" else None)
            if isinstance(dimension, int) and scores.dim() > 1 and scores.shape[dimension] <= _MOST_EXPERTS:
                _invent(chosen, scores, dimension, name, asks)
        return found

    return choose


def _invent(chosen: torch.Tensor, scores: torch.Tensor, dimension: int, name: str, asks: Asks) -> None:
    """Gives a tensor of choices its numbers. Each token goes on after the choices of the one before it."""
    among = scores.shape[dimension]
    if not asks.lets_choose(name, among):
        return
    shape = list(chosen.shape)
    of_a_token = shape.pop(dimension) if chosen.dim() == scores.dim() else 1
    numbers = torch.arange(chosen.numel(), dtype=chosen.dtype, device="cpu") % among
    in_turn = numbers.reshape(*shape, of_a_token).movedim(-1, dimension)
    known_numbers.keep(chosen, in_turn.reshape(chosen.shape).contiguous())
