"""A column of `TRIAL_COLUMNS` stands in every table of trials that it names, and nowhere else."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_fixtures import recorded_study
from rich.console import Console

from zerotune.flows.live_view import LiveView
from zerotune.tasks import results
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.report import study_view
from zerotune.trial_lib.report.html_report import render_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_view import TrialColumn, trial_columns
from zerotune.trial_lib.report.tables import print_study
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.history import StudyState, read_history

HEADING, CELL = "a new column", "7,777,777"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> StudyPaths:
    return recorded_study(tmp_path_factory.mktemp("study"))


def report(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    return render_report(read_study(paths.root), []).partition('<table class="trials')[2]


def show(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    out = io.StringIO()
    print_study(read_study(paths.root), Console(file=out, width=300))
    return out.getvalue()


def live(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    shutil.copy(paths.history, folder)
    arguments = StudyArguments(config_path=folder / "experiment.yaml", model_dir=folder)
    view, out = LiveView(StudyPaths(folder), arguments), io.StringIO()
    view._read()
    Console(file=out, width=300).print(view._picture())
    return out.getvalue()


def prefect(paths: StudyPaths, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    tables: list[Any] = []
    made = SimpleNamespace(create=lambda: SimpleNamespace(id=None))
    monkeypatch.setattr(results, "_begin_search", lambda: None)
    monkeypatch.setattr(results, "TableArtifact", lambda table, **_: tables.append(table) or made)
    monkeypatch.setattr(results, "ProgressArtifact", lambda **_: made)
    state = StudyState(read_history(paths.history))
    setup = SimpleNamespace(arguments=SimpleNamespace(max_trials=8))
    driver: Any = SimpleNamespace(log=None, state=state, setup=setup, metric="throughput")
    results.Progress(driver).finish()
    return str(tables)


TABLES = {"report": report, "show": show, "live": live, "prefect": prefect}


@pytest.mark.parametrize("named", [tuple(TABLES), ("show",), ("prefect", "live")])
@pytest.mark.parametrize("table", TABLES)
def test_a_new_column_is_in_each_table_that_it_names(
    table: str, named: tuple[Any, ...], paths: StudyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = TrialColumn(HEADING, lambda row: CELL, "number", named)
    monkeypatch.setattr(study_view, "TRIAL_COLUMNS", (*study_view.TRIAL_COLUMNS, new))
    shown = TABLES[table](paths, monkeypatch, tmp_path)
    assert "-mbs" in shown
    assert (HEADING in shown, CELL in shown) == (table in named, table in named)


@pytest.mark.parametrize("table", TABLES)
def test_samples_a_second_are_in_one_column(table: Any) -> None:
    names = [column.name for column in trial_columns(table, "latency")]
    assert names[:5] == ["trial", "candidate", "latency", "samples/s", "peak memory"]
    names = [column.name for column in trial_columns(table, "throughput")]
    assert names[:4] == ["trial", "candidate", "throughput", "peak memory"]
