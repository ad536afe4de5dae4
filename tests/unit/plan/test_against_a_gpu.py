"""What an H200 has measured, and what a foreseen run of the same trials says: the committed figures."""

import json

import pytest

from benchmarks.gpu.foreseen import MEASURED, RESULTS, figures, settings_of

FORESEEN = json.loads((RESULTS / "gpu_h200_memory_foreseen.json").read_text())


def test_an_arm_has_the_settings_of_its_name() -> None:
    assert settings_of("stage 0") == {"stage": 0}
    place = {"device": "cpu", "pin_memory": True}
    assert settings_of("stage 2, offloaded") == {"stage": 2, "offload_optimizer": place}


def test_every_trial_that_completed_is_compared() -> None:
    trials = json.loads(MEASURED.read_text())["figures"]["trials"]
    measured = [(row["arm"], row["micro_batch"]) for row in trials if row["outcome"] == "completed"]
    assert [(row["arm"], row["micro_batch"]) for row in FORESEEN["MiB"]] == measured
    for row, trial in zip(FORESEEN["MiB"], trials, strict=True):
        assert figures(trial, 1, 1)["allocated"]["measured"] == row["allocated"]["measured"]


@pytest.mark.parametrize("row", FORESEEN["MiB"], ids=lambda row: f"{row['arm']}, {row['micro_batch']}")
def test_allocated_memory_is_foreseen_within_a_hundredth(row: dict[str, dict[str, int]]) -> None:
    assert row["allocated"]["foreseen"] == pytest.approx(row["allocated"]["measured"], rel=0.01)
