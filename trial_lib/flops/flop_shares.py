"""Checks whether the FLOPs that ranks have counted are shares of one figure. Pure functions; standard library only.

Ranks that have the same part of a model do equal work for a sample, apart from the sizes of their samples. Twice as
many tokens take at least twice the work. Attention makes that four times at most. If a rank is further off, it has work
that was not counted, in a kernel without a formula, or work of its own. The counts are then no figure of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

# A program's work differs by chance, or by its data, for samples of one size. It may skip layers, or predict fewer
# tokens. If a rank's backward pass is not counted, the rank has a third of the work.
_MOST_APART = 2.0
# The largest exponent by which work grows with the size of a sample.
_POWER = 2


@dataclass(frozen=True)
class FlopShare:
    """The count of one rank for a sample.

    Attributes:
        flops: of the sample, on average.
        elements: numbers in its inputs, on average.
    """

    flops: float
    elements: float


def are_shares_of_one(shares: Sequence[FlopShare]) -> bool:
    """Returns whether the sizes of the samples explain every difference between the ranks' counts.

    Args:
        shares: of ranks that have the same part of the model.
    """
    by_size = sorted(shares, key=lambda share: share.elements)
    return all(_is_explained(smaller, larger) for smaller, larger in combinations(by_size, 2))


def _is_explained(smaller: FlopShare, larger: FlopShare) -> bool:
    growth = larger.elements / smaller.elements if smaller.elements else 1.0
    return smaller.flops / _MOST_APART <= larger.flops <= smaller.flops * growth**_POWER * _MOST_APART
