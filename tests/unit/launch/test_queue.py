"""Who may take which slots: first come, first served, and a later claim only where it can delay no earlier one."""

from collections.abc import Sequence

from zerotune.trial_lib.launch.slots import Claim, may_take, wait_of

ALL = ("0", "1", "2", "3")


def claim(arrived: int, count: int = 1, wants: Sequence[str] = ALL, holds: Sequence[str] = ()) -> Claim:
    return Claim(arrived, tuple(wants), count, tuple(holds), 100.0 + arrived, f"trial-{arrived}", 7, uid=0)


def test_free_slots_are_taken_by_preference() -> None:
    assert may_take(claim(5, 2, ("2", "0", "1")), [claim(1, holds=["0"])]) == ("2", "1")
    assert may_take(claim(5, 2), []) == ("0", "1")


def test_too_few_free_slots_are_waited_for() -> None:
    assert may_take(claim(5, 4), [claim(1, holds=["3"])]) is None


def test_a_later_claim_takes_nothing_that_an_earlier_one_may_need() -> None:
    others = [claim(1, holds=["0", "1", "2"]), claim(2, 4)]
    assert may_take(claim(3), others) is None
    assert may_take(claim(0), others) == ("3",)


def test_of_claims_that_arrive_in_one_moment_one_is_first() -> None:
    one, other = claim(3), claim(3)
    assert may_take(one, [claim(1, 3, holds=["0", "1", "2"]), other]) == ("3",)


def test_a_later_claim_takes_what_no_earlier_one_can_need() -> None:
    # The holder gives three back at once, and the earlier one wants two.
    others = [claim(1, holds=["0", "1", "2"]), claim(2, 2)]
    assert may_take(claim(3), others) == ("3",)
    # One of two holders may end first, and then it needs that one.
    others = [claim(1, holds=["0"]), claim(1, holds=["1", "2"]), claim(2, 2)]
    assert may_take(claim(3), others) is None


def test_what_is_free_beyond_an_earlier_one_that_has_not_looked_yet_may_be_taken() -> None:
    assert may_take(claim(3, 2), [claim(2, 2)]) == ("0", "1")
    assert may_take(claim(3, 3), [claim(2, 2)]) is None


def test_claims_that_want_other_devices_do_not_wait_for_each_other() -> None:
    others = [claim(1, holds=["0"]), claim(2, 2, ("0", "1"))]
    assert may_take(claim(3, 2, ("2", "3")), others) == ("2", "3")
    assert may_take(claim(3, 1, ("1", "2")), others) == ("2",)
    assert may_take(claim(3, 1, ("1",)), others) is None


def test_one_that_waits_behind_another_can_do_without_no_slot() -> None:
    others = [claim(1, holds=["0", "1"]), claim(2, 3, ("0", "1", "2")), claim(3, 2, ("2", "3"))]
    assert may_take(claim(4, 1, ("3",)), others) is None


def test_a_wait_has_its_place_and_who_holds_the_slots() -> None:
    others = [
        *(claim(1, holds=["0"]), claim(2, 4), claim(3, 1, ("9",)), claim(4, holds=["9"])),
        *(claim(6, holds=["1", "2", "3"]), claim(7)),
    ]
    wait = wait_of(claim(5, 2), others)
    assert (wait.count, wait.of, wait.place) == (2, 4, 2)
    assert wait.holders == (("trial-1 of root (pid 7)", 101.0), ("trial-6 of root (pid 7)", 106.0))
