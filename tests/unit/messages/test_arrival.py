"""How the samples that are asked for show in the batches that arrive."""

import pytest

from zerotune.trial_lib.messages.measurement import Arrival


def test_a_row_is_a_sample_where_as_many_arrive_as_the_engine_is_set_to() -> None:
    arrival = Arrival.of_typed(8, (8,), tokens=None)
    assert arrival.rows_per_sample == 1
    assert arrival.samples(16, asked=16) == 16
    assert arrival.follows(16, 16, None)
    assert not arrival.follows(16, 8, None)


def test_a_preference_pair_is_one_sample_of_two_rows() -> None:
    arrival = Arrival.of_typed(4, (8, 100), tokens=800)
    assert arrival.rows(asked=1) == 2
    assert arrival.follows(1, 2, 200)
    assert not arrival.follows(1, 8, 800)
    assert arrival.samples(6, asked=3) == 3


def test_a_row_that_holds_all_samples_is_told_by_its_tokens() -> None:
    packed = Arrival.of_typed(8, (1, 800), tokens=800)
    assert packed.rows_per_sample == 0
    assert packed.samples(1, asked=2) == 2
    assert packed.follows(1, 1, tokens=70)
    assert not packed.follows(1, 1, tokens=790)
    assert packed.follows(16, 1, tokens=1500)
    assert not packed.follows(16, 1, tokens=800)


@pytest.mark.parametrize(("micro_batch", "rows", "tokens"), [(8, 12, None), (8, 5, 500), (8, 1, None)])
def test_rows_that_are_no_multiple_are_samples(micro_batch: int, rows: int, tokens: int | None) -> None:
    assert Arrival.of_typed(micro_batch, (rows,), tokens).rows_per_sample == 1


def test_where_batches_vary_each_row_is_a_sample_and_any_number_will_do() -> None:
    varied = Arrival(varies=True)
    assert varied.samples(37, asked=1) == 37
    assert varied.follows(1, 37, None)


# A program as typed with a micro-batch of 8, and what it feeds when it is asked for one sample, or two.
@pytest.mark.parametrize(
    ("typed", "asked", "sizes", "dimension", "rows_per_sample"),
    [
        pytest.param((8, 64), 1, (1, 64), 0, 1, id="rows"),
        pytest.param((64, 8), 1, (64, 1), 1, 1, id="sequence first"),
        pytest.param((64, 8), 2, (64, 2), 1, 1, id="sequence first, at two"),
        pytest.param((8, 8), 1, (1, 8), 0, 1, id="as long as there are rows"),
        pytest.param((8, 8), 1, (8, 1), 1, 1, id="as long as there are rows, sequence first"),
        pytest.param((16, 8), 1, (2, 8), 0, 2, id="pairs, as long as there are samples"),
        pytest.param((16, 8), 1, (2, 9), 0, 2, id="pairs, of another length then"),
        pytest.param((16, 8), 1, (16, 1), 1, 1, id="sequence first, twice as long as there are samples"),
        pytest.param((64, 16), 1, (64, 2), 1, 2, id="pairs, sequence first"),
        pytest.param((1, 8), 1, (1, 1), 0, 0, id="packed, a token a sample"),
    ],
)
def test_the_dimension_that_follows_a_second_size_has_the_rows(
    typed: tuple[int, int], asked: int, sizes: tuple[int, int], dimension: int, rows_per_sample: int
) -> None:
    arrival = Arrival.of_typed(8, typed, tokens=typed[0] * typed[1]).at(asked, sizes, sizes[0] * sizes[1])
    assert (arrival.dimension, arrival.rows_per_sample) == (dimension, rows_per_sample)
    assert arrival.follows(asked, sizes[dimension], sizes[0] * sizes[1])
    # From there on nothing is left to chance.
    assert arrival.at(16, (7, 16 * 7), 7 * 16 * 7) == arrival


@pytest.mark.parametrize("typed", [(8, 64), (64, 8), (8, 8), (16, 8), (64, 16), (12, 64)])
def test_a_program_that_ignores_the_size_follows_in_no_dimension(typed: tuple[int, int]) -> None:
    tokens = typed[0] * typed[1]
    arrival = Arrival.of_typed(8, typed, tokens).at(1, typed, tokens)
    assert not arrival.follows(1, typed[arrival.dimension], tokens)


def test_what_nobody_has_seen_as_typed_may_be_either() -> None:
    assert Arrival().at(8, (64, 8), 512).dimension == 1
    assert Arrival().at(8, (8, 64), 512).dimension == 0
    assert Arrival().at(8, (8, 8), 64).dimension == 0


def test_batches_that_vary_are_not_read_otherwise_by_chance() -> None:
    varied = Arrival(varies=True)
    assert varied.at(8, (37, 8), 37 * 8) == varied


@pytest.mark.parametrize(
    ("typed", "engine", "asked", "micro_batches", "accumulates"),
    [
        pytest.param(2, 2, 4, 4, True, id="as the engine is set to"),
        pytest.param(2, 2, 4, 2, False, id="as typed"),
        pytest.param(1, 1, 2, 1, False, id="after each"),
        pytest.param(1, 2, 4, 1, False, id="after each, whatever the engine was set to"),
        pytest.param(2, 1, 4, 8, True, id="two for each"),
        pytest.param(3, 4, 8, 5, True, id="at the end of the data"),
        pytest.param(2, 2, 2, 3, True, id="what was typed"),
        pytest.param(None, 1, 4, 1, True, id="nobody knows"),
        pytest.param(2, 2, 4, 0, True, id="none is seen"),
    ],
)
def test_an_optimizer_step_follows_the_accumulation_as_it_did_when_it_was_typed(
    typed: int | None, engine: int, asked: int, micro_batches: int, accumulates: bool
) -> None:
    arrival = Arrival(typed_accumulation=engine, typed_micro_batches=typed)
    assert arrival.accumulates(asked, micro_batches) is accumulates
