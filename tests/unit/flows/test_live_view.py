"""The table that a terminal shows while a study runs."""

import json
import shutil
import time
from pathlib import Path

import pytest

from zerotune.flows.terminal import LiveView
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments

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


def test_each_trial_has_one_line_however_many_knobs_its_name_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    # So many that trial 7, which differs in three fine knobs, is among the best.
    history = (RECORDED / "history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "history.jsonl").write_text("".join(history[:18]))
    arguments = StudyArguments(config_path=tmp_path / "experiment.yaml", model_dir=tmp_path)
    with LiveView(StudyPaths(tmp_path), arguments):
        pass
    shown = capsys.readouterr().err.splitlines()
    (line,) = {line.strip() for line in shown if "  0007  " in line}
    assert "  z3-mbs64-no-" in line
    assert "…  " in line
    assert line.endswith("532 MiB")
    # What is the same for all takes no room.
    assert "fresh" not in line


def test_a_note_follows_the_lines_of_the_trials_that_ended_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = (RECORDED / "history.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "history.jsonl").write_text("".join(history[:4]))
    arguments = StudyArguments(config_path=tmp_path / "experiment.yaml", model_dir=tmp_path)
    with LiveView(StudyPaths(tmp_path), arguments) as view:
        (tmp_path / "history.jsonl").write_text("".join(history[:18]))
        view.note("The search is over.")
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1] == "The search is over."
    assert sum(line.startswith("trial 00") for line in shown) > 4
    assert len(set(shown)) == len(shown)


def test_a_trial_that_waits_for_slots_is_not_called_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    asked = (RECORDED / "history.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "history.jsonl").write_text(asked)
    paths = StudyPaths(tmp_path)
    paths.trial(0).root.mkdir(parents=True)
    paths.trial(0).waiting.write_text(
        json.dumps({"waiting": "2 of 8 slots", "since": ["another boot", 0.0, time.time() - 200]})
    )
    arguments = StudyArguments(config_path=tmp_path / "experiment.yaml", model_dir=tmp_path)
    with LiveView(paths, arguments):
        pass
    shown = capsys.readouterr().err
    assert "waiting for slots: 0000 profile" in shown
    assert ": 2 of 8 slots, after 3 min 20 s" in shown
    assert "running:" not in shown
