"""A trial's steps take what they take a training: the host prepares the next one while the device is at work."""

from typing import Any

import pytest

from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = [pytest.mark.alone, pytest.mark.devices(1, "cuda")]

WINDOW = StepWindow(start_step=5, end_step=24, max_steps=20)


@pytest.mark.parametrize("device_ms", [20.0, 40.0])
def test_a_step_takes_what_its_device_works(trials: Any, device_ms: float) -> None:
    options = ("--device_ms", str(device_ms), "--host_ms", "0")
    result = trials.run("works_ahead.py", *options, window=WINDOW)
    assert result.outcome == "completed", result.reason
    assert result.metrics["latency"] == pytest.approx(device_ms / 1000, rel=0.1)


def test_what_the_host_prepares_meanwhile_is_not_added(trials: Any) -> None:
    """20 ms of the device beside 15 of the host are 20 in a training; waiting for each step would make them 35."""
    result = trials.run("works_ahead.py", "--device_ms", "20", "--host_ms", "15", window=WINDOW)
    assert result.outcome == "completed", result.reason
    assert 0.018 < result.metrics["latency"] < 0.026


def test_the_host_is_what_a_step_takes_where_it_takes_longer(trials: Any) -> None:
    result = trials.run("works_ahead.py", "--device_ms", "5", "--host_ms", "30", window=WINDOW)
    assert result.outcome == "completed", result.reason
    assert 0.030 < result.metrics["latency"] < 0.038


def test_the_parts_of_a_step_are_no_longer_than_it(trials: Any) -> None:
    result = trials.run("works_ahead.py", "--device_ms", "20", "--host_ms", "1", window=WINDOW)
    assert result.outcome == "completed", result.reason
    metrics = result.metrics
    assert 0.0 < metrics["forward"] + metrics["backward"] < 1.1 * metrics["latency"]
