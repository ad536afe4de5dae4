"""How few sizes are asked about to find the largest that fits."""

import pytest

from zerotune.trial_lib.search.sizes import leading

COUNTS = range(12)


def asked(true: int, count: int, near: int) -> tuple[int, list[int]]:
    """Returns what is found of places of which so many hold, and the places that were asked about."""
    places: list[int] = []

    def holds(place: int) -> bool:
        assert 0 <= place < count
        places.append(place)
        return place < true

    return leading(holds, count, near), places


@pytest.mark.parametrize("count", COUNTS)
def test_whatever_the_guess_all_that_hold_are_found(count: int) -> None:
    for true in range(count + 1):
        for near in range(count + 2):
            found, places = asked(true, count, near)
            assert found == true
            assert len(places) == len(set(places))


def test_a_guess_that_is_right_costs_two_questions_and_one_that_is_near_few_more() -> None:
    for true in range(101):
        assert len(asked(true, 100, true)[1]) <= 2
        assert len(asked(true, 100, true + 1)[1]) <= 4
        assert len(asked(true, 100, max(0, true - 1))[1]) <= 4


def test_a_guess_that_is_far_off_costs_about_twice_as_many_as_halving() -> None:
    assert max(len(asked(true, 1024, near)[1]) for true in range(0, 1025, 31) for near in (0, 1, 512, 1024)) <= 22
