"""Makes MLflow have the content of a full experiment's folder: its record, and its metrics as they come.

Each full experiment has one run, which is found by the record's id. The run's `sent` tag says which metrics have
arrived. A restarted driver resumes there. If the driver before was killed in between, some metrics are sent twice,
which is harmless because name, step and time are the same.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from trial_lib.records.full_experiment_folder import FullExperimentPaths, FullExperimentRecord
from trial_lib.records.study_folder import work_dir_of
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.tracking.run_content import (
    FULL_EXPERIMENT,
    RECORD_ID,
    RunContent,
    full_experiment_artifacts,
    full_experiment_content,
    legal_name,
)
from trial_lib.tracking.runs import SENT, Runs, milliseconds
from trial_lib.tracking.sync import files_hash
from trial_lib.tracking.tracking_uri import run_page
from trial_lib.wire.metrics_file import SYSTEM, TRAINING, VALIDATION, MetricsReader, MetricsRecord

_MEASURED = (TRAINING, VALIDATION, SYSTEM)


class NoStudyRunError(Exception):
    """MLflow does not have the full experiment's study yet."""


class FullExperimentSync:
    """Sends a full experiment's folder to MLflow, repeatedly as it grows. After an error, make a new one.

    Attributes:
        page: the path of the run's page; None before MLflow has it.
        run_page: the same.
    """

    def __init__(self, paths: FullExperimentPaths, tracking_uri: str) -> None:
        self.page: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri
        self._runs: Runs | None = None
        self._parent_run_id: str | None = None
        self._files = {"metrics": paths.metrics, "system_metrics": paths.system_metrics}
        self._readers = {name: MetricsReader(path) for name, path in self._files.items()}
        self._sent = dict.fromkeys(self._files, 0)  # file -> bytes whose metrics MLflow has
        self._content_sent = ""

    @property
    def run_page(self) -> str | None:
        """The path of the run's page."""
        return self.page

    def run(self) -> None:
        """Sends new content: metrics first, then the record, so that an ended run is complete.

        Raises:
            Exception: whatever MLflow raises, and NoStudyRunError. The part that has arrived stays.
        """
        paths = self._paths
        fingerprint = files_hash([paths.record, *full_experiment_artifacts(paths)])
        record = FullExperimentRecord.model_validate_json(paths.record.read_text())
        runs = self._runs or self._connect(record)
        content = full_experiment_content(record, paths, self._parent_run_id)
        run_id = runs.run_of(content)
        self.page = run_page(runs.experiment_id, run_id)
        self._send_metrics(runs, run_id)
        if self._content_sent != fingerprint:
            runs.send(self._sendable(runs, content))
            self._content_sent = fingerprint

    def _connect(self, record: FullExperimentRecord) -> Runs:
        wanted = f"tags.{RECORD_ID} = '{record.experiment_id}'"
        # The full experiment of a study is in the study's folder.
        work_dir = work_dir_of(self._paths.root if record.study_id is None else self._paths.root.parent)
        secrets = KnownSecrets.of(self._paths.experiment, self._paths.record)
        runs = Runs(self._tracking_uri, secrets, record.name, wanted, work_dir, FULL_EXPERIMENT)
        if record.study_id is not None:
            study = next(runs.search(f"tags.{RECORD_ID} = '{record.study_id}'"), None)
            if study is None:
                raise NoStudyRunError(f"the study {record.study_id} has no run yet")
            self._parent_run_id = study.info.run_id
        found = runs.found.get(record.experiment_id)
        if found is not None:
            self._sent.update(self._still_there(found.data.tags.get(SENT, "")))
        self._runs = runs
        return runs

    def _still_there(self, mark: str) -> dict[str, int]:
        """Returns the number of sent bytes of each file; 0 for a file that has become shorter."""
        sent: dict[str, int] = json.loads(mark) if mark else {}
        return {
            name: size
            for name, size in sent.items()
            if name in self._files and self._files[name].exists() and self._files[name].stat().st_size >= size
        }

    def _send_metrics(self, runs: Runs, run_id: str) -> None:
        sent = dict(self._sent)
        for name, reader in self._readers.items():
            records = [record for record in reader.read() if record.end > sent[name]]
            runs.log_metrics(run_id, _points(records))
            if records:
                sent[name] = records[-1].end
        if sent != self._sent:
            runs.mark(run_id, json.dumps(sent))
        self._sent = sent

    def _sendable(self, runs: Runs, content: RunContent) -> RunContent:
        """Returns the content without the params that the run has, because MLflow accepts a param only once."""
        found = runs.found.get(content.record_id)
        if found is None:
            return content
        known = found.data.params
        return replace(content, params={name: value for name, value in content.params.items() if name not in known})


def _points(records: Sequence[MetricsRecord]) -> list[tuple[str, float, int, int]]:
    """Returns the values of records for MLflow, under names such as `validation.loss`."""
    return [
        (legal_name(f"{record.kind}.{name}"), value, milliseconds(record.time), record.batch)
        for record in records
        if record.kind in _MEASURED
        for name, value in record.metrics.items()
        # MLflow turns an infinite value into the largest float, which then wins every comparison.
        if math.isfinite(value)
    ]
