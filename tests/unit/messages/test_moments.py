"""Seconds between moments, whatever the wall clock is set to."""

import json
import time

import pytest

from zerotune.trial_lib.messages import orders


@pytest.mark.parametrize("jump", [10 * 365 * 86400.0, -86400.0])
def test_a_wall_clock_that_is_set_changes_no_duration(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    began, wall = orders.now(), time.time()
    monkeypatch.setattr(time, "time", lambda: wall + jump)
    assert 0 <= orders.seconds_since(json.loads(json.dumps(began))) < 5


def test_the_hosts_of_a_trial_have_the_wall_clock_in_common() -> None:
    assert orders.seconds_since(["another boot", 1e6, time.time() - 100]) == pytest.approx(100, abs=5)
    assert orders.seconds_since(["another boot", 1e6, time.time() + 100]) == 0.0
