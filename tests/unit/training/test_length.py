"""Batches, records and epochs: what is due when, and where epochs begin and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.training.context import Pace
from zerotune.trial_lib.training.distributed import InvalidTrialError

EXACT = Pace(train_batch_size=8, accumulation=2, micro_batches_per_epoch=6)
INEXACT = Pace(train_batch_size=8, accumulation=2, micro_batches_per_epoch=5)
UNKNOWN = Pace(train_batch_size=8, accumulation=2)
paces = st.builds(
    Pace,
    train_batch_size=st.integers(1, 64),
    accumulation=st.integers(1, 9),
    micro_batches_per_epoch=st.integers(1, 40),
)
lengths = st.builds(
    lambda unit, count: {unit: count}, st.sampled_from(["batches", "records", "epochs"]), st.integers(1, 30)
)


def test_a_length_is_reached_by_the_first_batch_that_completes_it() -> None:
    assert EXACT.batches_for({"batches": 5}) == 5
    assert EXACT.batches_for({"records": 17}) == 3
    assert EXACT.batches_for({"epochs": 2}) == 6
    assert INEXACT.batches_for({"epochs": 1}) == 3


@given(pace=paces, length=lengths)
def test_no_fewer_batches_reach_a_length(pace: Pace, length: dict[str, int]) -> None:
    ((unit, count),) = length.items()
    batches = pace.batches_for(length)
    assert pace.done(batches, unit) >= count > pace.done(batches - 1, unit)


@given(pace=paces, period=lengths)
def test_a_period_is_due_once_for_each_time_that_it_is_completed(pace: Pace, period: dict[str, int]) -> None:
    ((unit, count),) = period.items()
    due = [batches for batches in range(1, 60) if pace.is_due(period, batches)]
    # Periods shorter than a batch are completed several times within it, and due once.
    assert len(due) == len({pace.done(batches, unit) // count for batches in range(1, 60)} - {0})


@given(pace=paces)
def test_an_epoch_begins_after_another_has_ended(pace: Pace) -> None:
    for batch_idx in range(1, 50):
        assert pace.is_epoch_start(batch_idx) == pace.is_epoch_end(batch_idx - 1)


def test_epochs_begin_with_a_batch_where_the_accumulation_divides_them() -> None:
    assert [EXACT.epoch_of(batch) for batch in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert EXACT.inexact_epochs is None
    assert INEXACT.inexact_epochs is not None
    assert [INEXACT.epoch_of(batch) for batch in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_no_period_and_one_of_none_are_never_due() -> None:
    assert not any(EXACT.is_due(None, batches) or EXACT.is_due({"batches": 0}, batches) for batches in range(1, 20))


def test_epochs_of_unknown_length_can_be_given_in_records() -> None:
    told = Pace(train_batch_size=8, accumulation=2, records_per_epoch=24)
    assert told.batches_for({"epochs": 2}) == 6
    assert UNKNOWN.batches_for({"records": 20}) == 3
    with pytest.raises(InvalidTrialError, match="Set records_per_epoch"):
        UNKNOWN.batches_for({"epochs": 1})
    with pytest.raises(InvalidTrialError, match="Set records_per_epoch"):
        UNKNOWN.is_due({"epochs": 1}, 1)
