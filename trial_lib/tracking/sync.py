"""Makes MLflow have the content of a study's folder, exactly once.

Every run carries its record's id as a tag, and is looked up before it is created. Everything else can be sent again
unchanged: params and tags by name, metrics by name, step and time, artifacts by name. So sending everything completes a
run that a killed process left half written. A complete run has a last tag, a hash of the files that it came from. Only
the store records what was sent, so no second record can disagree with it.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from trial_lib.records.study_folder import StudyPaths, StudyRecord, TrialPaths, work_dir_of
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.tracking.run_content import STUDY_ID, RunContent, study_artifacts, study_content, trial_content
from trial_lib.tracking.runs import SENT, Runs
from trial_lib.tracking.tracking_uri import run_page, trials_page
from trial_lib.tracking.trials_view import trials_view, view_key


class StudySync:
    """Sends a study's folder to MLflow, repeatedly as it grows. After an error, make a new one.

    Attributes:
        page: the path of the page with the study's trials; None before MLflow has it.
        run_page: the path of the page of the study's own run; None before MLflow has it.
    """

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        self.page: str | None = None
        self.run_page: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri
        self._runs: Runs | None = None
        self._sent: dict[str, str] = {}  # record id -> hash of the files it came from
        self._hashes: set[str] = set()  # the same hashes, which thousands of trials are looked up in
        self._settled: set[str] = set()  # folders of trials that MLflow has, whose results do not change

    def run(self) -> None:
        """Sends new content: ended trials first, then the study, so that an ended parent is complete."""
        paths = self._paths
        fingerprint = files_hash([paths.record, *study_artifacts(paths)])
        record = StudyRecord.model_validate_json(paths.record.read_text())
        study = study_content(record, paths)
        runs = self._runs or self._connect(record)
        run_id = runs.run_of(study)
        self.page = trials_page(runs.experiment_id, view_key(record.study_id))
        self.run_page = run_page(runs.experiment_id, run_id)
        if paths.trial(0).root.name not in self._settled:
            # The profile trial may find some in the code.
            runs.secrets = KnownSecrets.of_study(paths)
        for name in sorted({*os.listdir(paths.trials)} - self._settled):  # noqa: PTH208 - names alone, thousands of them
            if self._send_trial(runs, record, TrialPaths(paths.trials / name), run_id):
                self._settled.add(name)
        if self._sent.get(record.study_id) != fingerprint:
            self._send(runs, study, fingerprint)

    def _connect(self, record: StudyRecord) -> Runs:
        wanted = f"tags.{STUDY_ID} = '{record.study_id}'"
        work_dir, secrets = work_dir_of(self._paths.root), KnownSecrets.of_study(self._paths)
        self._runs = Runs(self._tracking_uri, secrets, record.name, wanted, work_dir)
        self._runs.tag_experiment(*trials_view(record))
        self._sent = {record_id: run.data.tags.get(SENT, "") for record_id, run in self._runs.found.items()}
        self._hashes = set(self._sent.values())
        return self._runs

    def _send_trial(self, runs: Runs, record: StudyRecord, paths: TrialPaths, parent_run_id: str) -> bool:
        """Sends a trial that was not sent yet; returns whether it has ended."""
        if not paths.result.exists():
            return False
        fingerprint = files_hash([paths.result])
        if fingerprint not in self._hashes:  # a result contains its trial's id, so no two have the same hash
            self._send(runs, trial_content(record, paths, parent_run_id), fingerprint)
        return True

    def _send(self, runs: Runs, content: RunContent, fingerprint: str) -> None:
        runs.send(content)
        runs.mark(runs.run_of(content), fingerprint)
        self._sent[content.record_id] = fingerprint
        self._hashes.add(fingerprint)


def files_hash(files: Iterable[Path]) -> str:
    """Returns a hash of the names and contents of the files that exist."""
    digest = hashlib.sha256()
    for file in files:
        if file.exists():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
