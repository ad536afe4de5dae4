"""What cannot be sent to MLflow, because its record is damaged, is bad input."""

from pathlib import Path

import pytest

from flows.sync_command import sync_command
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.full_experiment import FullExperimentPaths
from trial_lib.experiment.study import StudyPaths


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
