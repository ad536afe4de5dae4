"""A study is sent to MLflow, and a damaged record is bad input."""

from pathlib import Path

import pytest

from flows.commands.sync import sync_command
from trial_lib.records.full_experiment_folder import FullExperimentPaths
from trial_lib.records.study_folder import StudyPaths, StudyRecord
from trial_lib.wire.errors import InputError


@pytest.mark.parametrize("paths", [StudyPaths, FullExperimentPaths])
def test_a_damaged_record_is_bad_input_and_nothing_is_sent(
    paths: type[StudyPaths] | type[FullExperimentPaths], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = tmp_path / "zerotune-studies" / "s-1"
    root.mkdir(parents=True)
    record = paths(root).record
    record.write_text('{"half":')
    with pytest.raises(InputError, match=f"{record}: .* record is damaged"):
        sync_command(root)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_study_that_was_sent_is_told_with_its_page(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    paths = StudyPaths(tmp_path / "zerotune-studies" / "s-1")
    paths.trials.mkdir(parents=True)
    record = StudyRecord(study_id="s-1", name="hello", method="asha", metric="throughput")
    paths.record.write_text(record.model_dump_json())
    assert sync_command(paths.root) == 0
    *_, sent, command, page = capsys.readouterr().err.splitlines()
    assert "has all records of s-1." in sent
    assert command == f"In MLflow:     mlflow ui --backend-store-uri {store}"
    assert page.split() == [*["then", "open:"], page.split()[-1]]
    assert page.endswith("&viewStateShareKey=s-1")
