"""What a study writes may hold secrets: its folder and all that ZeroTune writes there are their owner's alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulated_studies import Experiment

from zerotune.trial_lib.report.html_report import write_report
from zerotune.trial_lib.tracking.runs import schema_lock


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def test_nobody_else_reads_what_a_study_writes(tmp_path: Path) -> None:
    team = Experiment(tmp_path)
    study = team.tune()
    write_report(study.paths)
    assert study.paths.history.exists()
    assert study.paths.best_command.exists()
    assert open_to_others(study.paths.root) == []
    assert stat.S_IMODE(study.paths.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(study.paths.root.parent.stat().st_mode) == 0o700


def test_nobody_else_reads_an_mlflow_store_that_this_makes(tmp_path: Path) -> None:
    with schema_lock(f"sqlite:///{tmp_path}/mlflow.db"):
        pass
    assert (tmp_path / "mlflow.db").exists()
    assert open_to_others(tmp_path) == []
