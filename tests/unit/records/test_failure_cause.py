"""The reasons of failed trials as sentences."""

import pytest

from zerotune.trial_lib.records.result import as_sentence


@pytest.mark.parametrize(
    ("reason", "said"),
    [("KeyError: 'labels'", "KeyError: 'labels'."), ("It ended. ", "It ended."), ("", ""), (" \n", "")],
)
def test_a_reason_has_one_full_stop_and_no_reason_has_none(reason: str, said: str) -> None:
    assert as_sentence(reason) == said
