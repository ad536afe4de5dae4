"""What sending a growing study reads: a trial that MLflow has is not looked at again."""

from pathlib import Path

import pytest

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.tracking import sync
from zerotune.trial_lib.tracking.run_content import RunContent
from zerotune.trial_lib.tracking.sync import StudySync


class Runs:
    """An MLflow that takes in everything."""

    def __init__(self, *_: object) -> None:
        self.experiment_id = "1"
        self.found: dict[str, object] = {}
        self.sent: list[str] = []

    def tag_experiment(self, name: str, value: str) -> None:
        pass

    def run_of(self, content: RunContent) -> str:
        return content.record_id

    def send(self, content: RunContent) -> None:
        self.sent.append(content.record_id)

    def mark(self, run_id: str, sent: str) -> None:
        pass


def add_trial(paths: StudyPaths, number: int) -> None:
    trial = paths.trial(number)
    trial.root.mkdir(parents=True)
    trial.candidate.write_text(Candidate(micro_batch_size=1).model_dump_json())
    result = TrialResult(
        trial_id=f"study/{number:04d}",
        number=number,
        purpose=Purpose.SEARCH,
        config_hash="",
        outcome=Outcome.COMPLETED,
    )
    trial.result.write_text(result.to_text())


def test_each_trial_is_read_once_and_one_that_has_not_ended_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "Runs", Runs)
    read: list[Path] = []
    content = sync.trial_content
    monkeypatch.setattr(
        sync, "trial_content", lambda record, paths, run: (read.append(paths.root), content(record, paths, run))[1]
    )
    paths = StudyPaths(tmp_path)
    paths.record.write_text(
        StudyRecord(study_id="study", name="n", method="asha", metric="throughput").model_dump_json()
    )
    for number in range(3):
        add_trial(paths, number)
    paths.trial(3).root.mkdir()
    sending = StudySync(paths, "sqlite:///none.db")
    sending.run()
    assert read == [paths.trial(number).root for number in range(3)]
    hashed: list[Path] = []
    files_hash = sync.files_hash
    monkeypatch.setattr(
        sync, "files_hash", lambda files: (files := list(files), hashed.extend(files), files_hash(files))[2]
    )
    paths.trial(3).root.rmdir()
    add_trial(paths, 3)
    sending.run()
    assert read[3:] == [paths.trial(3).root]
    assert not [file for file in hashed if file.name == "result.json" and file.parent.name != "0003"]
