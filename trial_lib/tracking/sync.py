"""Makes MLflow have the content of the folder of a study, a full experiment or a plan, exactly once.

Every run carries its record's id as a tag, and is looked up before it is created. Everything else can be sent again
unchanged: params and tags by name, metrics by name, step and time, artifacts by name. So sending everything completes a
run that a killed process left half written. A complete run has a last tag, a hash of the files that it came from. Only
the store records what was sent, so no second record can disagree with it.
"""

import hashlib
import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.files import SYSTEM, TRAINING, VALIDATION, MetricsReader, MetricsRecord
from zerotune.trial_lib.plan.plan_record import PlanPaths, PlanRecord
from zerotune.trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
    TrialPaths,
    work_dir_of,
)
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.switches import path_of
from zerotune.trial_lib.tracking.run_content import (
    ACCUMULATION_PARAM,
    FULL_EXPERIMENT,
    MICRO_BATCH_PARAM,
    ORDER,
    PLAN,
    RECORD_ID,
    STAGE_PARAM,
    STUDY_ID,
    WINNER,
    RunContent,
    full_experiment_content,
    legal_name,
    order_of,
    plan_artifacts,
    plan_content,
    study_artifacts,
    study_content,
    trial_content,
)
from zerotune.trial_lib.tracking.runs import SENT, Runs, milliseconds
from zerotune.trial_lib.tracking.tracking_uri import run_page, trials_page, ways_to, without_password

# The view in which MLflow's pages show a study's trials: which runs, in what order, with which columns and charts.


_TAG = "mlflow.sharedViewState."
_KNOBS = (STAGE_PARAM, MICRO_BATCH_PARAM, ACCUMULATION_PARAM)
# MLflow puts a chart of each metric into the section of this name. Without the section it shows none of them.
_MLFLOWS_SECTION = "Model metrics"


def trials_view(record: StudyRecord) -> tuple[str, str]:
    """A study's view as an experiment's tag: its name and its value. The same record gives the same view."""
    metric = SEARCH_METRICS[record.metric]
    value = f"metrics.`{metric.with_unit or metric.name}`"
    units = [f"metrics.`{each.with_unit}`" for each in SEARCH_METRICS.values() if each.with_unit]
    knobs = [*_KNOBS, *(legal_name(path_of(place)) for place in record.switches)]
    params = [f"params.`{name}`" for name in knobs]
    columns = [f"tags.`{WINNER}`", *dict.fromkeys((value, *units)), *params]
    columns += ["tags.`outcome`", "attributes.`Description`"]
    state = {
        # The study's own run is one of them: it has the answer, the report and the configuration.
        "searchFilter": f"tags.{STUDY_ID} = '{record.study_id}'",
        "orderByKey": f"metrics.`{ORDER}`",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnOrder": columns,
        "runsHiddenMode": "SHOW_ALL",
        **_charts(metric.name, knobs),
    }
    created_at = milliseconds(record.started_at)
    view = {
        "name": f"Trials of {record.study_id}",
        "createdAt": created_at,
        "updatedAt": created_at,
        "state": json.dumps(state),
    }
    return f"{_TAG}{record.study_id}", json.dumps(view)


def _charts(metric: str, knobs: Sequence[str]) -> dict[str, Any]:
    cards = [
        {"type": "BAR", "metricKey": metric, "displayName": metric, "runsCountToCompare": 100},
        {
            "type": "SCATTER",
            "xaxis": {"key": MICRO_BATCH_PARAM, "type": "PARAM"},
            "yaxis": {"key": metric, "type": "METRIC"},
            "runsCountToCompare": 100,
        },
        {
            "type": "PARALLEL",
            "selectedParams": list(knobs),
            "selectedMetrics": [metric],
            "showAllRuns": True,
            "runsCountToCompare": 100,
        },
    ]
    sections = ["The search", _MLFLOWS_SECTION]
    everywhere = {"metricSectionId": sections[0], "deleted": False, "isGenerated": False}
    return {
        "compareRunCharts": [{"uuid": f"chart-{place}", **everywhere, **card} for place, card in enumerate(cards)],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": True, "isReordered": False} for name in sections
        ],
    }


class Sync(ABC):
    """Sends a folder to MLflow, repeatedly as it grows. After an error, make a new one."""

    model: type[Any]  # of the folder's record
    id_field: str  # the field of the record with its id
    kind: str | None = None  # the tag of the folder's own run
    found_by = RECORD_ID  # the tag by which the folder's runs are found

    def __init__(self, paths: Any, tracking_uri: str) -> None:
        self.page: str | None = None  # the path of the page that shows the content; None before MLflow has it
        self.run_page: str | None = None  # that of the folder's own run
        self._paths = paths
        self._tracking_uri = tracking_uri
        self._runs: Runs | None = None
        self._sent: dict[str, str] = {}  # record id -> hash of the files it came from

    def run(self) -> None:
        """Sends new content. The record comes last, so that an ended run is complete. What has arrived stays."""
        paths = self._paths
        fingerprint = files_hash([paths.record, *self._files()])
        record = self.model.model_validate_json(paths.record.read_text())
        runs = self._runs or self._connect(record)
        content = self._content(record)
        run_id = runs.run_of(content)
        self.page = self.run_page = run_page(runs.experiment_id, run_id)
        self._send_parts(runs, record, run_id)
        if self._sent.get(content.record_id) != fingerprint:
            self._send(runs, content, fingerprint)

    @abstractmethod
    def _files(self) -> list[Path]:
        """The files, besides the record, whose change makes the folder's own run change."""

    @abstractmethod
    def _content(self, record: Any) -> RunContent:
        """The content of the folder's own run."""

    def _send_parts(self, runs: Runs, record: Any, run_id: str) -> None:  # noqa: B027 - a plan has none
        """Sends what belongs to the folder's own run besides its content."""

    def _connect(self, record: Any) -> Runs:
        wanted = f"tags.{self.found_by} = '{getattr(record, self.id_field)}'"
        self._runs = Runs(self._tracking_uri, self._secrets(), record.name, wanted, self._work_dir(record), self.kind)
        self._sent = {record_id: run.data.tags.get(SENT, "") for record_id, run in self._runs.found.items()}
        return self._runs

    def _secrets(self) -> KnownSecrets:
        return KnownSecrets.of(self._paths.experiment, self._paths.record)

    def _work_dir(self, record: Any) -> Path:
        return work_dir_of(self._paths.root)

    def _send(self, runs: Runs, content: RunContent, fingerprint: str) -> None:
        runs.send(content)
        runs.mark(runs.run_of(content), fingerprint)
        self._sent[content.record_id] = fingerprint


def files_hash(files: Iterable[Path]) -> str:
    """A hash of the names and contents of the files that exist."""
    digest = hashlib.sha256()
    for file in files:
        if file.exists():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


class PlanSync(Sync):
    """Sends a plan as a run of its own, in the experiment of its studies."""

    model, id_field, kind = PlanRecord, "plan_id", PLAN
    _paths: PlanPaths

    def _files(self) -> list[Path]:
        return plan_artifacts(self._paths)

    def _content(self, record: PlanRecord) -> RunContent:
        return plan_content(record, self._paths)


class StudySync(Sync):
    """Sends a study with its trials. Its page is the table of them."""

    model, id_field, found_by = StudyRecord, "study_id", STUDY_ID
    _paths: StudyPaths

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        super().__init__(paths, tracking_uri)
        self._hashes: set[str] = set()  # those of `_sent`, which thousands of trials are looked up in
        self._settled: set[str] = set()  # folders of trials that MLflow has, whose results do not change

    def _files(self) -> list[Path]:
        return study_artifacts(self._paths)

    def _content(self, record: StudyRecord) -> RunContent:
        return study_content(record, self._paths)

    def _secrets(self) -> KnownSecrets:
        return KnownSecrets.of_study(self._paths)

    def _connect(self, record: StudyRecord) -> Runs:
        runs = super()._connect(record)
        runs.tag_experiment(*trials_view(record))
        self._hashes = set(self._sent.values())
        return runs

    def _send_parts(self, runs: Runs, record: StudyRecord, run_id: str) -> None:
        paths = self._paths
        self.page = trials_page(runs.experiment_id, record.study_id)
        if paths.trial(0).root.name not in self._settled:
            # The profile trial may find some in the code.
            runs.secrets = self._secrets()
        names = os.listdir(paths.trials)  # noqa: PTH208 - names alone, thousands of them
        for name in sorted({*names} - self._settled):
            trial = TrialPaths(paths.trials / name)
            if not trial.result.exists():
                continue
            fingerprint = files_hash([trial.result])
            if fingerprint not in self._hashes:  # a result contains its trial's id, so no two have the same hash
                self._send(runs, trial_content(record, trial, run_id), fingerprint)
            # The profile trial writes a result for each place of the batch that it tries.
            if len(names) > 1 or record.status is not StudyStatus.RUNNING:
                self._settled.add(name)
        best = None if record.best_number is None else paths.trial(record.best_number)
        if record.status is StudyStatus.COMPLETED and best is not None and best.result.exists():
            content = trial_content(record, best, run_id)
            runs.tag(content, WINNER, "winner")
            value = next((each.value for each in content.metrics if each.name == ORDER), None)
            # A metric's last step is what MLflow sorts by.
            top = order_of(record.metric, value, "answer").items()
            runs.log_metrics(runs.run_of(content), [(n, v, milliseconds(record.started_at), 1) for n, v in top])

    def _send(self, runs: Runs, content: RunContent, fingerprint: str) -> None:
        super()._send(runs, content, fingerprint)
        self._hashes.add(fingerprint)


_MEASURED = (TRAINING, VALIDATION, SYSTEM)


class NoStudyRunError(Exception):
    """MLflow does not have the full experiment's study yet."""


class FullExperimentSync(Sync):
    """Sends a full experiment with its metrics as they come. The mark of its run says how many of them were sent."""

    model, id_field, kind = FullExperimentRecord, "experiment_id", FULL_EXPERIMENT
    _paths: FullExperimentPaths

    def __init__(self, paths: FullExperimentPaths, tracking_uri: str) -> None:
        super().__init__(paths, tracking_uri)
        self._parent_run_id: str | None = None
        self._metrics = {"metrics": paths.metrics, "system_metrics": paths.system_metrics}
        self._readers = {name: MetricsReader(path) for name, path in self._metrics.items()}
        self._bytes_sent = dict.fromkeys(self._metrics, 0)  # file -> bytes whose metrics MLflow has

    def _files(self) -> list[Path]:
        return [self._paths.ds_config]

    def _content(self, record: FullExperimentRecord) -> RunContent:
        return full_experiment_content(record, self._paths, self._parent_run_id)

    def _work_dir(self, record: FullExperimentRecord) -> Path:
        # The full experiment of a study is in the study's folder.
        return work_dir_of(self._paths.root if record.study_id is None else self._paths.root.parent)

    def _connect(self, record: FullExperimentRecord) -> Runs:
        runs = super()._connect(record)
        if record.study_id is not None:
            study = next(runs.search(f"tags.{RECORD_ID} = '{record.study_id}'"), None)
            if study is None:
                raise NoStudyRunError(f"the study {record.study_id} has no run yet")
            self._parent_run_id = study.info.run_id
        self._bytes_sent.update(self._still_there(self._sent.get(record.experiment_id, "")))
        return runs

    def _still_there(self, mark: str) -> dict[str, int]:
        # The number of sent bytes of each file; 0 for a file that has become shorter.
        sent: dict[str, int] = json.loads(mark) if mark else {}
        return {
            name: size
            for name, size in sent.items()
            if name in self._metrics and self._metrics[name].exists() and self._metrics[name].stat().st_size >= size
        }

    def _send_parts(self, runs: Runs, record: FullExperimentRecord, run_id: str) -> None:
        sent = dict(self._bytes_sent)
        for name, reader in self._readers.items():
            records = [record for record in reader.read() if record.end > sent[name]]
            runs.log_metrics(run_id, _points(records))
            if records:
                sent[name] = records[-1].end
        if sent != self._bytes_sent:
            runs.mark(run_id, json.dumps(sent))
        self._bytes_sent = sent

    def _send(self, runs: Runs, content: RunContent, fingerprint: str) -> None:
        # Without the params that the run has, because MLflow accepts a param only once.
        found = runs.found.get(content.record_id)
        known = {} if found is None else found.data.params
        new = {name: value for name, value in content.params.items() if name not in known}
        runs.send(replace(content, params=new))
        self._sent[content.record_id] = fingerprint


def _points(records: Sequence[MetricsRecord]) -> list[tuple[str, float, int, int]]:
    # The values of records for MLflow, under names such as `validation.loss`.
    return [
        (legal_name(f"{record.kind}.{name}"), value, milliseconds(record.time), record.batch)
        for record in records
        if record.kind in _MEASURED
        for name, value in record.metrics.items()
        # MLflow turns an infinite value into the largest float, which then wins every comparison.
        if math.isfinite(value)
    ]


# Sends a folder while it grows, in a thread of its own, so that MLflow holds nothing up.

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNTOLD_S = 3.0


class Tracker:
    """Keeps MLflow up to date with a folder."""

    def __init__(self, new_sync: Callable[[], Sync], tracking_uri: str) -> None:
        self.tracking_uri = without_password(tracking_uri)  # to be shown
        self.last_error: str | None = None  # why the last attempt failed or came too late; None after a success
        self._uri = tracking_uri
        self._new_sync = new_sync
        self._sync = new_sync()
        self._changed = threading.Condition()
        self._noted = 0  # notifications so far
        self._arrived = 0  # notifications whose content MLflow has
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracker")

    def start(self) -> None:
        self.notify()
        self._thread.start()

    def notify(self) -> None:
        """Tells the thread that the folder has new content. Returns at once."""
        with self._changed:
            self._noted += 1
            self._changed.notify()

    def close(self, timeout_s: float, tell: Callable[[str], None] = lambda sentence: None) -> bool:
        """Sends the rest, and waits at most for the timeout. Returns whether MLflow has everything."""
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(min(_UNTOLD_S, timeout_s))
        if self._thread.is_alive():
            tell(f"Waiting for MLflow, for {timeout_s:.0f} s at most.")
            self._thread.join(max(0.0, timeout_s - _UNTOLD_S))
        arrived = self._arrived == self._noted
        if not arrived and self.last_error is None:
            self.last_error = f"it takes longer than {timeout_s:.0f} s"
        return arrived

    @property
    def ways(self) -> tuple[str, ...]:
        """The way to the folder's page in MLflow: the command to type, if any, and the page's address."""
        return ways_to(self._uri, self._sync.page)

    @property
    def run_ways(self) -> tuple[str, ...]:
        """The same for the page of the folder's own run, which begins with its description."""
        return ways_to(self._uri, self._sync.run_page)

    @property
    def _closing(self) -> bool:
        return self._deadline < math.inf

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while time.monotonic() < self._deadline:
            with self._changed:
                self._changed.wait_for(lambda: self._noted > self._arrived or self._closing)
                noted = self._noted
            if noted == self._arrived:
                return
            if self._send():
                self._arrived = noted
                pause_s = _FIRST_PAUSE_S
            elif self._closing:
                time.sleep(_FIRST_PAUSE_S)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _send(self) -> bool:
        try:
            self._sync.run()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with MLflow, the work continues
            self.last_error = str(error).replace(self._uri, self.tracking_uri)
            self._sync = self._new_sync()
            return False
        self.last_error = None
        return True
