"""The line with the best trial says of how many trials its speed is the median."""

from typing import Any

import pytest

from zerotune.flows.tuning import best_line

BEST = {"trial": 14, "label": "confirm-z1-mbs16", "value": 439.1, "throughput": 439.1}
ALONE = "Best trial:    0014, confirm-z1-mbs16: throughput 439.1 samples/s"


@pytest.mark.parametrize(
    ("confirmation", "line"),
    [
        ({"winner": {"trials": [10, 12, 14, 15]}}, f"{ALONE} (over 4 confirming trials)"),
        ({"winner": {"trials": [14]}}, ALONE),
        ({"winner": None}, ALONE),
        (None, ALONE),
    ],
)
def test_a_median_is_not_said_to_be_of_one_trial(confirmation: dict[str, Any] | None, line: str) -> None:
    assert best_line("throughput", {"best": BEST, "confirmation": confirmation}) == line
