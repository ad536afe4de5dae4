"""Makes MLflow have the content of a study's folder, exactly once.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from trial_lib.inputs.known_secrets import KnownSecrets, sent_command
from trial_lib.messages.files import SYSTEM, TRAINING, VALIDATION, MetricsReader, MetricsRecord
from trial_lib.plan.answer import fewest_sentence
from trial_lib.plan.plan_record import ForeseenRange, PlannedArm, PlannedDevices, PlanPaths, PlanRecord
from trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    TrialPaths,
    work_dir_of,
)
from trial_lib.records.result import SEARCH_METRICS
from trial_lib.records.switches import path_of
from trial_lib.tracking.run_content import (
    ACCUMULATION_PARAM,
    DESCRIPTION,
    FULL_EXPERIMENT,
    KIND,
    MICRO_BATCH_PARAM,
    PURPOSE,
    RECORD_ID,
    STAGE_PARAM,
    STUDY_ID,
    RunContent,
    as_params,
    as_points,
    as_tags,
    full_experiment_content,
    legal_name,
    study_artifacts,
    study_content,
    trial_content,
)
from trial_lib.tracking.runs import SENT, Runs, milliseconds
from trial_lib.tracking.tracking_uri import run_page, trials_page, ways_to, without_password

# The view in which MLflow's pages show a study's trials: which runs, in what order, with which columns and charts.


_TAG = "mlflow.sharedViewState."
_KNOBS = (STAGE_PARAM, MICRO_BATCH_PARAM, ACCUMULATION_PARAM)
# MLflow puts a chart of each metric into the section of this name. Without the section it shows none of them.
_MLFLOWS_SECTION = "Model metrics"


def trials_view(record: StudyRecord) -> tuple[str, str]:
    """A study's view as an experiment's tag: its name and its value. The same record gives the same view."""
    metric = SEARCH_METRICS[record.metric]
    value = f"metrics.`{metric.name}`"
    knobs = [*_KNOBS, *(legal_name(path_of(place)) for place in record.switches)]
    params = [f"params.`{name}`" for name in knobs]
    columns = [value, *params, "tags.`outcome`", "attributes.`Description`"]
    state = {
        # Only the trials. The study's own run would count as one of them.
        "searchFilter": f"tags.{STUDY_ID} = '{record.study_id}' AND tags.{PURPOSE} LIKE '%'",
        "orderByKey": value,
        "orderByAsc": metric.smaller_is_better,
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


class StudySync:
    """Sends a study's folder to MLflow, repeatedly as it grows. After an error, make a new one."""

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        self.page: str | None = None  # the path of the page with the study's trials; None before MLflow has it
        self.run_page: str | None = None  # that of the study's own run
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
        self.page = trials_page(runs.experiment_id, record.study_id)
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
        # Sends a trial that was not sent yet; returns whether it has ended.
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
    """A hash of the names and contents of the files that exist."""
    digest = hashlib.sha256()
    for file in files:
        if file.exists():
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# Makes MLflow have the content of a full experiment's folder: its record, and its metrics as they come.

_MEASURED = (TRAINING, VALIDATION, SYSTEM)


class NoStudyRunError(Exception):
    """MLflow does not have the full experiment's study yet."""


class FullExperimentSync:
    """Sends a full experiment's folder to MLflow, repeatedly as it grows. After an error, make a new one."""

    def __init__(self, paths: FullExperimentPaths, tracking_uri: str) -> None:
        self.page: str | None = None  # the path of the run's page; None before MLflow has it
        self.run_page: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri
        self._runs: Runs | None = None
        self._parent_run_id: str | None = None
        self._files = {"metrics": paths.metrics, "system_metrics": paths.system_metrics}
        self._readers = {name: MetricsReader(path) for name, path in self._files.items()}
        self._sent = dict.fromkeys(self._files, 0)  # file -> bytes whose metrics MLflow has
        self._content_sent = ""

    def run(self) -> None:
        """Sends metrics first, then the record, so that an ended run is complete. What has arrived stays."""
        paths = self._paths
        fingerprint = files_hash([paths.record, paths.ds_config])
        record = FullExperimentRecord.model_validate_json(paths.record.read_text())
        runs = self._runs or self._connect(record)
        content = full_experiment_content(record, paths, self._parent_run_id)
        run_id = runs.run_of(content)
        self.page = self.run_page = run_page(runs.experiment_id, run_id)
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
        # The number of sent bytes of each file; 0 for a file that has become shorter.
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
        # The content without the params that the run has, because MLflow accepts a param only once.
        found = runs.found.get(content.record_id)
        if found is None:
            return content
        known = found.data.params
        return replace(content, params={name: value for name, value in content.params.items() if name not in known})


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


# Makes MLflow have a plan as a run of its own, in the experiment of its studies.

PLAN = "plan"  # the kind of a plan's run


class PlanSync:
    """Sends a plan's folder to MLflow, once. It can be sent again unchanged."""

    def __init__(self, paths: PlanPaths, tracking_uri: str) -> None:
        self.page: str | None = None  # the path of the run's page; None before MLflow has it
        self.run_page: str | None = None
        self._paths = paths
        self._tracking_uri = tracking_uri

    def run(self) -> None:
        """Raises whatever MLflow raises. The part that has arrived stays."""
        paths = self._paths
        fingerprint = files_hash([paths.record, *plan_artifacts(paths)])
        record = PlanRecord.model_validate_json(paths.record.read_text())
        wanted = f"tags.{RECORD_ID} = '{record.plan_id}'"
        secrets = KnownSecrets.of(paths.experiment, paths.record)
        runs = Runs(self._tracking_uri, secrets, record.name, wanted, work_dir_of(paths.root), PLAN)
        found = runs.found.get(record.plan_id)
        content = plan_content(record, paths)
        run_id = runs.run_of(content)
        self.page = self.run_page = run_page(runs.experiment_id, run_id)
        if found is None or found.data.tags.get(SENT) != fingerprint:
            runs.send(content)
            runs.mark(run_id, fingerprint)


def plan_artifacts(paths: PlanPaths) -> list[Path]:
    """The files of a plan that go to MLflow."""
    return [paths.record, paths.best_ds_config, paths.report]


def plan_content(record: PlanRecord, paths: PlanPaths) -> RunContent:
    """The run of a plan. The names of its metrics begin with `foreseen`, because nothing was measured."""
    chosen = record.chosen
    stage = 0 if chosen is None else chosen.ds_config.get("zero_optimization", {}).get("stage", 0)
    best = {} if record.best is None else {"best_devices": record.devices[record.best].label}
    tags = {
        RECORD_ID: record.plan_id,
        KIND: PLAN,
        "finding": record.answer,
        "reason": record.stopped,
        **best,
        **{f"version.{name}": version for name, version in record.versions.items()},
        DESCRIPTION: _description(record),
    }
    params = {
        "model_dir": record.model_dir,
        "on": [devices.label for devices in record.devices],
        "train_batch_size": record.train_batch_size,
        **({} if chosen is None else {"best": chosen.label, STAGE_PARAM: stage, **chosen.knobs}),
    }
    metrics = {
        "parameters": float(record.parameters),
        "plan.seconds": record.seconds,
        "plan.peak_memory": float(record.peak_bytes),
        **({} if chosen is None else dict(_metrics("foreseen.best", chosen))),
    }
    for devices in record.devices:
        for arm in devices.arms:
            metrics |= dict(_metrics(f"foreseen.{devices.label.replace(':', ' ')}.{arm.label}", arm))
    return RunContent(
        record_id=record.plan_id,
        name=record.plan_id,
        status="FAILED" if record.stopped else "FINISHED",
        started_at=record.started_at,
        ended_at=record.started_at + record.seconds,
        tags=as_tags(tags),
        params=as_params(params),
        metrics=as_points(metrics),
        artifacts=[file for file in plan_artifacts(paths) if file.exists()],
    )


def _metrics(prefix: str, arm: PlannedArm) -> Iterator[tuple[str, float]]:
    # An arm's figures: shares, samples, bytes, samples and tokens a second.
    yield f"{prefix}.fits", arm.fits
    yield f"{prefix}.largest_micro_batch", float(arm.largest_micro_batch)
    ranges: dict[str, ForeseenRange | None] = {
        "samples_per_s": arm.samples_per_s,
        "tokens_per_s": arm.tokens_per_s,
        "mfu": arm.mfu,
        "cost_per_billion_tokens": arm.cost,
        "peak_memory": arm.peak,
    }
    for name, figure in ranges.items():
        if figure is not None:
            yield f"{prefix}.{name}", figure.value


def _description(record: PlanRecord) -> str:
    lines = [f"**{record.answer or record.stopped}**"]
    lines += [_of_devices(devices) for devices in record.devices]
    if record.best_command:
        command = sent_command(record.best_command, Path(record.model_dir))
        lines.append(f"**To start there** (`best_ds_config.json`):\n\n```sh\n{command}\n```")
    lines.append(f"A plan for **{record.name}**. All figures are foreseen; no device has measured them.")
    return "\n\n".join(lines)


def _of_devices(devices: PlannedDevices) -> str:
    sentences = [devices.answer, *devices.why, fewest_sentence(devices)]
    return "\n".join(
        [f"**{devices.label}**", "", *(f"- {sentence}" for sentence in dict.fromkeys(sentences) if sentence)]
    )


# Sends a folder while it grows, in a thread of its own, so that MLflow holds nothing up.

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNTOLD_S = 3.0


class Sync(Protocol):
    """Sends a folder, repeatedly as it grows."""

    page: str | None  # the path of the page that shows the folder's content; None before MLflow has it
    run_page: str | None  # that of the folder's own run

    def run(self) -> None:
        """Sends new content. After an error, make a new one."""


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
