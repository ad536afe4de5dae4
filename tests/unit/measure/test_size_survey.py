"""Whether micro-batches differ in size."""

import pytest

from trial_lib.measure.size_survey import vary


@pytest.mark.parametrize("rows", [[102, 39, 64, 15, 102, 9, 24], [9, 15, 9, 9], [1, 2, 3]])
def test_batches_of_a_token_budget_vary(rows: list[int]) -> None:
    assert vary(rows)


@pytest.mark.parametrize("rows", [[], [8], [8, 8, 8], [8, 8, 3, 8, 8, 3], [8, 3, 8, 3]])
def test_a_smaller_last_batch_of_the_data_is_no_variation(rows: list[int]) -> None:
    assert not vary(rows)
