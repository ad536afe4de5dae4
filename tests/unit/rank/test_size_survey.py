"""Whether micro-batches differ in size."""

from types import SimpleNamespace

import pytest

from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.surveys import SizeSurvey, vary


@pytest.mark.parametrize("rows", [[102, 39, 64, 15, 102, 9, 24], [9, 15, 9, 9], [1, 2, 3]])
def test_batches_of_a_token_budget_vary(rows: list[int]) -> None:
    assert vary(rows)


@pytest.mark.parametrize("rows", [[], [8], [8, 8, 8], [8, 8, 3, 8, 8, 3], [8, 3, 8, 3]])
def test_a_smaller_last_batch_of_the_data_is_no_variation(rows: list[int]) -> None:
    assert not vary(rows)


def concluded(ranks: list[list[tuple[int, ...]]], asked: int = 8) -> list[tuple[Arrival, ProgramFacts]]:
    """Has ranks conclude on the sizes of their micro-batches, each as its first one says at first."""
    watches = [
        SimpleNamespace(asked=asked, sizes=sizes, arrival=Arrival.of_typed(asked, sizes[0], None)) for sizes in ranks
    ]
    for watch in watches:
        watch.rows_in = lambda sizes, watch=watch: sizes[watch.arrival.dimension]
        watch.rows = [watch.rows_in(sizes) for sizes in watch.sizes]
    brought: list[list[float]] = []

    def bring(values: list[float]) -> list[float]:
        brought.append(values)
        return values

    found = []
    for most in (bring, lambda values: [max(column) for column in zip(*brought, strict=True)]):
        found = []
        for watch in watches:
            facts, before = ProgramFacts(), watch.arrival
            SizeSurvey(watch, facts, most).conclude()
            found.append((watch.arrival, facts))
            if most is bring:
                watch.arrival = before
    return found


def test_a_length_that_is_the_micro_batch_by_chance_is_a_length_where_the_next_one_is_not() -> None:
    ((arrival, facts),) = concluded([[(12, 8), (4, 24), (2, 48), (8, 12)]])
    assert (arrival.dimension, arrival.varies, facts.found.batch_varies) == (0, True, True)
    assert (facts.found.batch_dimension, facts.found.rows_per_sample) == (0, 1)
    ((arrival, facts),) = concluded([[(16, 8), (16, 9), (16, 11)]])
    assert (arrival.dimension, arrival.rows_per_sample, facts.found.batch_varies) == (0, 2, False)


def test_sequences_first_of_many_lengths_are_batches_of_one_size() -> None:
    ((arrival, facts),) = concluded([[(8, 8), (24, 8), (13, 8), (14, 8)]])
    assert (arrival.dimension, arrival.rows_per_sample, facts.found.batch_varies) == (1, 1, False)


def test_all_ranks_read_batches_alike_whatever_the_first_of_each_looks_like() -> None:
    for arrival, facts in concluded([[(12, 8), (4, 24), (8, 12)], [(4, 24), (12, 8), (8, 12)]]):
        assert (arrival.dimension, facts.found.batch_varies) == (0, True)
    for arrival, facts in concluded([[(8, 8), (24, 8), (11, 8)], [(24, 8), (11, 8), (8, 8)]]):
        assert (arrival.dimension, facts.found.batch_varies) == (1, False)
    for arrival, facts in concluded([[(16, 8)], [(16, 9)]]):
        assert (arrival.dimension, arrival.rows_per_sample, facts.found.batch_varies) == (0, 2, False)
