"""Whether the FLOPs that ranks have counted are shares of one figure. Pure; standard library only.

Ranks that have the same part of a model compute as much for a sample as each other, but for the sizes of the samples:
of twice as many tokens it is at least as much, and at most, by attention, four times as much. A rank that is further
off has work that was not counted, in a kernel that has no formula, or has work of its own. What all of them have
counted is then no figure of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

# What a program does by chance, or by what its data hold, for samples of one size: layers that it leaves out, tokens
# that it predicts. A rank whose backward pass is not counted has a third.
_MOST_APART = 2.0
# How work grows with the size of a sample, at most.
_POWER = 2


@dataclass(frozen=True)
class FlopShare:
    """What one rank has counted for a sample.

    Attributes:
        flops: of the sample, on average.
        elements: numbers in its inputs, on average.
    """

    flops: float
    elements: float


def are_shares_of_one(shares: Sequence[FlopShare]) -> bool:
    """Returns whether no rank has counted more, or less, than the size of its samples explains.

    Args:
        shares: of ranks that have the same part of the model.
    """
    by_size = sorted(shares, key=lambda share: share.elements)
    return all(_is_explained(smaller, larger) for smaller, larger in combinations(by_size, 2))


def _is_explained(smaller: FlopShare, larger: FlopShare) -> bool:
    growth = larger.elements / smaller.elements if smaller.elements else 1.0
    return smaller.flops / _MOST_APART <= larger.flops <= smaller.flops * growth**_POWER * _MOST_APART
