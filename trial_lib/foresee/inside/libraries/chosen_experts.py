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
# More choices are no routing. A softmax looks for the largest of as many rows.
_MOST_CHOICES = 2**20
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
    default = -1 if name == "topk" else None

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        chosen = found[1] if isinstance(found, tuple) else found
        if isinstance(chosen, FakeTensor) and not known_numbers.is_known(chosen) and args:
            dimension = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
            if _may_route(args[0], chosen, dimension):
                note = asks.choice(name, args[0].shape[-1])
                if note is not None:
                    known_numbers.invent(chosen, _in_turn(chosen, args[0].shape[-1]), note)
        return found

    return choose


def _may_route(scores: torch.Tensor, chosen: torch.Tensor, dimension: Any) -> bool:
    """Returns whether scores may be those of a router, whose last dimension is the expert."""
    if not isinstance(dimension, int) or scores.dim() <= 1 or dimension not in (-1, scores.dim() - 1):
        return False
    return scores.shape[-1] <= _MOST_EXPERTS and chosen.numel() <= _MOST_CHOICES


def _in_turn(chosen: torch.Tensor, among: int) -> torch.Tensor:
    """Returns choices of which each goes on after those of the token before it."""
    return (torch.arange(chosen.numel(), dtype=chosen.dtype, device="cpu") % among).reshape(chosen.shape)
