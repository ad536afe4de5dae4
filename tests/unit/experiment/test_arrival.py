"""How the samples that are asked for show in the batches that arrive."""

import pytest

from trial_lib.experiment.arrival import Arrival


def test_a_row_is_a_sample_where_as_many_arrive_as_the_engine_is_set_to() -> None:
    arrival = Arrival.of_typed(8, rows=8, tokens=None)
    assert arrival.rows_per_sample == 1
    assert arrival.samples(16, asked=16) == 16
    assert arrival.follows(16, 16, None)
    assert not arrival.follows(16, 8, None)


def test_a_preference_pair_is_one_sample_of_two_rows() -> None:
    arrival = Arrival.of_typed(4, rows=8, tokens=800)
    assert arrival.rows(asked=1) == 2
    assert arrival.follows(1, 2, 200)
    assert not arrival.follows(1, 8, 800)
    assert arrival.samples(6, asked=3) == 3


def test_a_row_that_holds_all_samples_is_told_by_its_tokens() -> None:
    packed = Arrival.of_typed(8, rows=1, tokens=800)
    assert packed.rows_per_sample == 0
    assert packed.samples(1, asked=2) == 2
    assert packed.follows(1, 1, tokens=70)
    assert not packed.follows(1, 1, tokens=790)
    assert packed.follows(16, 1, tokens=1500)
    assert not packed.follows(16, 1, tokens=800)


@pytest.mark.parametrize(("micro_batch", "rows", "tokens"), [(8, 12, None), (8, 5, 500), (8, 1, None)])
def test_rows_that_are_no_multiple_are_samples(micro_batch: int, rows: int, tokens: int | None) -> None:
    assert Arrival.of_typed(micro_batch, rows, tokens).rows_per_sample == 1


def test_where_batches_vary_each_row_is_a_sample_and_any_number_will_do() -> None:
    varied = Arrival(varies=True)
    assert varied.samples(37, asked=1) == 37
    assert varied.follows(1, 37, None)
