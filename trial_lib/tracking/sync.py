"""Making MLflow have what a study's folder holds, exactly once.

Every run carries its record's id as a tag and is looked for before it is created. Everything else is the same when it
is sent again: params and tags by name, metrics by name, step and time, artifacts by name. So a run that a killed
process left half written is completed by writing all of it. A run that is complete says so by a last tag, a hash of the
files that it came from: the store alone knows what has been sent, and no second record can disagree with it.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from trial_lib.experiment.study import StudyPaths, StudyRecord, TrialPaths
from trial_lib.tracking.run_content import (
    RECORD_ID,
    STUDY_ID,
    RunContent,
    study_artifacts,
    study_content,
    trial_content,
)
from trial_lib.tracking.tracking_uri import artifact_location, sqlite_file

_SENT = "sent"
_SCHEMA_TIMEOUT_S = 120.0
_BATCH = 100  # params, or tags, in one request
_METRICS_BATCH = 1000
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Left to itself MLflow repeats a request whose answer is late, and so creates a run twice.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def sync_study(paths: StudyPaths, tracking_uri: str) -> None:
    """Sends what a study's folder holds and MLflow has not. Trials that have not ended are left for later.

    Args:
        paths: the study's folder.
        tracking_uri: MLflow's store or server.

    Raises:
        Exception: whatever MLflow raises. What has arrived by then stays, and is completed next time.
    """
    StudySync(paths, tracking_uri).run()


class StudySync:
    """Sends a study's folder to MLflow, again and again as it grows. After an error, take a new one.

    Attributes:
        experiment_id: MLflow's, once known.
        run_id: the parent run's, once known.
    """

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        self.experiment_id: str | None = None
        self.run_id: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._runs: dict[str, str] = {}  # record id -> run id
        self._sent: dict[str, str] = {}  # record id -> hash of the files it came from
        self._seen: dict[Path, int] = {}  # result that has been sent -> when it was written, in ns

    def run(self) -> None:
        """Sends what is new: trials that have ended, and then the study, so that a parent that has ended is whole."""
        paths = self._paths
        fingerprint = _fingerprint([paths.record, *study_artifacts(paths)])
        record = StudyRecord.model_validate_json(paths.record.read_text())
        study = study_content(record, paths)
        if self._client is None:
            self._connect(record)
        self.run_id = self._run_of(study)
        for folder in sorted(paths.trials.iterdir()):
            self._send_trial(record, TrialPaths(folder), self.run_id)
        if self._sent.get(record.study_id) != fingerprint:
            self._send(study, fingerprint)

    def _connect(self, record: StudyRecord) -> None:
        with _schema_lock(self._tracking_uri):
            client = _mlflow_client(self._tracking_uri)
            experiment = client.get_experiment_by_name(record.name)
            if experiment is not None:
                self.experiment_id = experiment.experiment_id
            else:
                self.experiment_id = client.create_experiment(record.name, artifact_location(self._tracking_uri))
        # A run whose creation was answered too late has been created once more: the one that was gone on with stays.
        for run in sorted(self._find_runs(client, record.study_id), key=lambda run: _SENT not in run.data.tags):
            record_id = run.data.tags[RECORD_ID]
            if record_id in self._runs:
                client.delete_run(run.info.run_id)
                continue
            self._runs[record_id] = run.info.run_id
            self._sent[record_id] = run.data.tags.get(_SENT, "")
        self._client = client

    def _find_runs(self, client: Any, study_id: str) -> Iterator[Any]:
        token = None
        while True:
            page = client.search_runs([self.experiment_id], f"tags.{STUDY_ID} = '{study_id}'", page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _send_trial(self, record: StudyRecord, paths: TrialPaths, parent_run_id: str) -> None:
        try:
            written = paths.result.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if self._seen.get(paths.result) == written:
            return
        fingerprint = _fingerprint([paths.result])
        if fingerprint not in self._sent.values():  # a result holds its trial's id, so no two have one hash
            self._send(trial_content(record, paths, parent_run_id), fingerprint)
        self._seen[paths.result] = written

    def _run_of(self, content: RunContent) -> str:
        """Returns the id of the run of a record, and creates it if there is none."""
        if content.record_id not in self._runs:
            run = self._client.create_run(
                self.experiment_id, _milliseconds(content.started_at), content.tags, content.name
            )
            self._runs[content.record_id] = run.info.run_id
        return self._runs[content.record_id]

    def _send(self, content: RunContent, fingerprint: str) -> None:
        from mlflow.entities import Metric, Param, RunTag

        client, run_id = self._client, self._run_of(content)
        started_at = _milliseconds(content.started_at)
        for tags in _batches(list(content.tags.items()), _BATCH):
            client.log_batch(run_id, tags=[RunTag(*tag) for tag in tags])
        for params in _batches(list(content.params.items()), _BATCH):
            client.log_batch(run_id, params=[Param(*param) for param in params])
        for points in _batches(content.metrics, _METRICS_BATCH):
            # All at the trial's start: a metric that is sent again is the same one only at the same time.
            client.log_batch(
                run_id, metrics=[Metric(point.name, point.value, started_at, point.step) for point in points]
            )
        for artifact in content.artifacts:
            client.log_artifact(run_id, str(artifact))
        if content.ended_at is None:
            client.update_run(run_id, content.status)
        else:
            client.set_terminated(run_id, content.status, _milliseconds(content.ended_at))
        client.set_tag(run_id, _SENT, fingerprint)
        self._sent[content.record_id] = fingerprint


def _mlflow_client(tracking_uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)


@contextlib.contextmanager
def _schema_lock(tracking_uri: str) -> Iterator[None]:
    """Keeps other processes from creating a SQLite store's tables at the same time, which fails for all but one."""
    database = sqlite_file(tracking_uri)
    if database is None:
        yield
        return
    with FileLock(f"{database}.lock", timeout=_SCHEMA_TIMEOUT_S):
        yield


def _fingerprint(files: Iterable[Path]) -> str:
    """Returns a hash of those files that exist, names and contents."""
    digest = hashlib.sha256()
    for file in files:
        if file.exists():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
