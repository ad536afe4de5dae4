"""The table that a terminal shows while a study runs."""

import json
import re
import shutil
import time
from pathlib import Path

import pytest

from zerotune.flows.live_view import LiveView
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


def test_the_time_left_is_told_for_the_confirmation_too(tmp_path: Path) -> None:
    history = (RECORDED / "history.jsonl").read_text().splitlines(keepends=True)
    stopped = next(place for place, line in enumerate(history) if "stop" in json.loads(line))
    view = LiveView(StudyPaths(tmp_path), StudyArguments(config_path=tmp_path / "e.yaml", model_dir=tmp_path))
    shown = []
    for lines in (14, stopped, stopped + 1, stopped + 5, len(history)):
        (tmp_path / "history.jsonl").write_text("".join(history[:lines]))
        view._read()
        shown.append(view._share_done())
    assert [words.endswith("left at most") for _, _, words in shown] == [True, True, False, False, False]
    done, longest, words = shown[2]
    assert (done, words) == (0.0, f"about 0:01:{longest - 60:02.0f} left to confirm")
    # It goes down, and has an end.
    assert 0 < shown[3][0] < shown[4][0] <= longest


def test_in_eighty_columns_a_row_has_what_tells_it_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    shutil.copy(RECORDED / "history.jsonl", tmp_path)
    arguments = StudyArguments(config_path=tmp_path / "experiment.yaml", model_dir=tmp_path)
    with LiveView(StudyPaths(tmp_path), arguments):
        pass
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("confirm-z0-mbs64" in line for line in lines)
    assert any(set(line.strip()) <= {"━", "╸", "╺"} for line in lines if line.strip())  # the bar


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
