"""The table that a terminal shows while a study runs."""

import shutil
from pathlib import Path

import pytest

from flows.live import LiveView
from trial_lib.records.study_folder import StudyPaths
from trial_lib.study.arguments import StudyArguments

RECORDED = Path(__file__).parents[2] / "recorded_study"


@pytest.mark.parametrize("metric", ["throughput", "FLOPS_per_gpu", "latency"])
def test_the_samples_a_second_stand_there_once(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copy(RECORDED / "history.jsonl", tmp_path)
    arguments = StudyArguments(config_path=tmp_path / "experiment.yaml", model_dir=tmp_path, metric=metric)
    with LiveView(StudyPaths(tmp_path), arguments):
        pass
    lines = capsys.readouterr().err.splitlines()
    place, header = next((place, line) for place, line in enumerate(lines) if "peak memory" in line)
    assert header.count(metric) == 1
    # In the header beside another metric, else with the values.
    assert f"{header}{lines[place + 1]}".count("samples/s") == 1
