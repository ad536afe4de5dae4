"""The interval of a gain contains the gain of a whole epoch, where steps differ with their data."""

import math
import random
from typing import Any

import pytest

from benchmarks.confirm_aa.data import simulate


def epoch(order: str) -> list[dict[str, Any]]:
    """The steps of two cuts of one batch, which take what the longest sample of each micro-batch makes them."""
    draws = random.Random(1)
    lengths = [min(600, max(4, int(40 * math.exp(draws.gauss(0.0, 1.0))))) for _ in range(8192)]
    if order == "sorted":
        lengths.sort()
    return [recorded(lengths, micro_batch) for micro_batch in (1, 8)]


def recorded(lengths: list[int], micro_batch: int) -> dict[str, Any]:
    costs = []
    for first in range(0, len(lengths), 8):
        batch = lengths[first : first + 8]
        cuts = [batch[place : place + micro_batch] for place in range(0, 8, micro_batch)]
        costs.append(sum(8e-3 + 1e-3 * max(cut) * len(cut) for cut in cuts))
    return {"cut": (micro_batch, 8 // micro_batch), "steps": costs, "beside_s": 2.0, "data_spread": 0.5}


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_an_interval_contains_the_gain_of_an_epoch(order: str) -> None:
    cuts = epoch(order)
    assert simulate(cuts, data_vary=True, studies=100, moves=True)["contain_the_gain_of_an_epoch"] >= 0.93
    # As it was when all rounds read the first batches.
    assert simulate(cuts, data_vary=True, studies=20, moves=False)["contain_the_gain_of_an_epoch"] < 0.5
