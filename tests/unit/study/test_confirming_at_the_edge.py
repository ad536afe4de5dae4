"""A trial whose allocator had to make room in its memory is measured again only where nothing else is left."""

import pytest
from test_confirmation import confirm, contender, result, speeds

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.result import Outcome, TrialResult


@pytest.mark.parametrize("steady", [True, False])
def test_what_had_to_make_room_in_its_memory_is_measured_again_only_where_nothing_else_is(steady: bool) -> None:
    short = Memory(peak=[5], after_initialize=[1], available=[5], counted_retries=[0, 3])
    ranked = [contender("short", 200.0, memory=short), *([contender("steady", 150.0, 2)] if steady else [])]
    found, order = confirm(ranked, speeds(own=100.0, short=200.0, steady=150.0))
    assert set(order) == {"own", "steady" if steady else "short"}
    assert found.winner is not None


def test_what_had_to_make_room_comes_after_all_others_have_failed() -> None:
    def measure(key: str) -> TrialResult:
        return result(key, outcome=Outcome.CRASHED) if key == "steady" else speeds(own=100.0, short=200.0)(key)

    short = Memory(counted_retries=[1])
    found, order = confirm([contender("short", 200.0, memory=short), contender("steady", 150.0, 2)], measure)
    assert list(dict.fromkeys(order)) == ["own", "steady", "short"]
    assert found.winner is not None
    assert found.winner.gain is not None
