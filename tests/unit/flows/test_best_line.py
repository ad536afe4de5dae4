"""What a command says at its end: the best trial with the number of its trials, and the answer once."""

import logging
from typing import Any

import pytest

from zerotune.flows.tuning import NoteHandler, best_line
from zerotune.trial_lib.study.confirm import OF_THE_ANSWER

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


def test_the_lines_of_the_answer_are_said_once_at_the_end_or_beside_a_document() -> None:
    for but_for, expected in ((OF_THE_ANSWER, ["Now it is confirmed."]), ((), ["2x faster", "Now it is confirmed."])):
        told: list[str] = []
        log = logging.Logger("study", logging.DEBUG)
        log.addHandler(NoteHandler(told.append, but_for))
        log.info("2x faster", extra=OF_THE_ANSWER)
        log.info("Now it is confirmed.")
        assert told == expected
