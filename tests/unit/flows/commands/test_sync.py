"""What cannot be sent to MLflow, because its record is damaged, is bad input."""

from pathlib import Path

import pytest

from flows.commands.sync import sync_command
from trial_lib.records.full_experiment_folder import FullExperimentPaths
from trial_lib.records.study_folder import StudyPaths
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
