"""Memory that runs out, of a GPU or of its host, is known for what it is, wherever in a step that happens."""

from typing import Any

import pytest
from device_fixtures import host_of_tests

from benchmarks.gpu.kit import MODELS, TOY
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = [pytest.mark.alone, pytest.mark.devices(1, "cuda")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
GIB = 2**30


def run_out(trials: Any, place: str, size: int, **options: Any) -> Any:
    words = (*TOY.options, "--out_of", place, "--bytes", str(size))
    return trials.run("train.py", *words, model_dir=MODELS, window=SHORT, **options)


@pytest.mark.parametrize("place", ["forward", "backward", "update", "initialize"])
def test_more_than_the_card_has_is_out_of_memory(trials: Any, place: str) -> None:
    result = run_out(trials, place, 2 * host_of_tests().memory_per_slot)
    assert result.outcome == "out_of_memory", result.reason
    assert "out of memory" in result.reason.lower()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_so_it_is_with_expandable_segments(trials: Any, place: str) -> None:
    environment = {**rank_environment(), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    result = run_out(trials, place, 2 * host_of_tests().memory_per_slot, environment=environment)
    assert result.outcome == "out_of_memory", result.reason


@pytest.mark.parametrize("place", ["pinned", "host"])
def test_more_than_the_host_has_is_out_of_host_memory(trials: Any, place: str) -> None:
    result = run_out(trials, place, 8 * GIB)
    assert result.outcome == "out_of_host_memory", result.reason


def test_the_card_is_as_it_was_after_a_trial_that_ran_out(trials: Any) -> None:
    before = trials.run("plain.py", window=SHORT).memory.available[0]
    run_out(trials, "backward", 2 * host_of_tests().memory_per_slot)
    after = trials.run("plain.py", window=SHORT).memory.available[0]
    assert after == pytest.approx(before, abs=64 * 2**20)
