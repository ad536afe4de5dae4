"""Runs in MLflow that carry a record's id. Each is looked up before it is created, and can be sent again unchanged."""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, sent_document, sent_text
from zerotune.trial_lib.messages.files import OWNERS_FILE, OWNERS_FOLDER, make_own
from zerotune.trial_lib.messages.orders import modules_in
from zerotune.trial_lib.tracking.run_content import (
    DESCRIPTION,
    IDS,
    KIND,
    PARAM_CHARACTERS,
    RECORD_ID,
    TAG_CHARACTERS,
    RunContent,
    cut,
)
from zerotune.trial_lib.tracking.tracking_uri import artifact_location, sqlite_file

# Removes known secrets from the content of runs, and from the copies of files that MLflow gets.


# Of a page: the user's commands and the ends of logs, which may hold anything. They are escaped, so no tag is in them.
_OWN = re.compile(r'(<(pre|td) class="(?:any )?own"[^>]*>)[^<]*(?=</\2>)')
_STAYS = r"\1(in the study's folder)"


def without_secrets(content: RunContent, secrets: KnownSecrets) -> RunContent:
    """The content of a run without secrets. Its files are unchanged."""
    return replace(
        content,
        name=secrets.hide(content.name),
        # Runs are found by these.
        tags={
            name: value if name in IDS else cut(secrets.hide(sent_text(value)), TAG_CHARACTERS)
            for name, value in content.tags.items()
        },
        params={name: cut(secrets.hide(value), PARAM_CHARACTERS) for name, value in content.params.items()},
        # ZeroTune writes no links. One in a folder that somebody has sent may lead to any file of this user's.
        artifacts=[file for file in content.artifacts if not file.is_symlink()],
    )


def shown_copy(file: Path, folder: Path, secrets: KnownSecrets) -> Path:
    """A copy of a study's file without secrets, under the same name."""
    copy = folder / file.name
    document = _document(file)
    if document is not None:
        if isinstance(document, dict) and "imported" in document:
            # What a program sets in its environment may be a secret that nothing shows.
            document["imported"] = modules_in(document["imported"])
        model_dir = Path(str(document.get("model_dir", "."))) if isinstance(document, dict) else Path()
        copy.write_text(json.dumps(secrets.hide_in(sent_document(document, model_dir)), indent=2) + "\n")
    elif file.suffix == ".html":
        # The page is drawn from values that may be shown. Text in it that only looks like a secret belongs to a script.
        copy.write_text(secrets.hide_values(_OWN.sub(_STAYS, file.read_text())))
    else:
        with (
            file.open(errors="surrogateescape", newline="") as lines,
            copy.open("w", errors="surrogateescape", newline="") as shown_lines,
        ):
            shown_lines.writelines(map(secrets.hide, lines))
    shutil.copystat(file, copy)
    return copy


def _document(file: Path) -> Any:
    # The content of a JSON file; None for another file, or a damaged one.
    try:
        return json.loads(file.read_text()) if file.suffix == ".json" else None
    except ValueError:
        return None


leavings: list[Path] = []


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder in the temporary folder, which is removed."""
    with tempfile.TemporaryDirectory(prefix="zerotune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        leavings.append(folder)
        try:
            yield folder
        finally:
            leavings.remove(folder)


SENT = "sent"  # the tag that names the content of a run; set last
_EXPERIMENT_KIND = "mlflow.experimentKind"
_MODEL_TRAINING = "custom_model_development"
_ABOUT = (
    "Studies of **{}** by ZeroTune: which DeepSpeed configuration trains it fastest. A study's run has the answer, the "
    "report and the winning configuration. Its child runs are the trials."
)
# A guess of MLflow's pages, not a user's choice.
_GUESSED_KINDS = ("", "no_inferred_type", "custom_model_development_inferred", "genai_development_inferred")
_SCHEMA_TIMEOUT_S = 120.0
_BATCH = 100  # params, or tags, in one request
_METRICS_BATCH = 800  # metrics: a request takes 1,000 of all three together
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # By default MLflow repeats a request whose answer is late, and so creates a run twice.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Answers:
    """Those of this process's stores and servers: when the last one was complete, in seconds of the monotonic clock."""

    last_at = 0.0


class Runs:
    """The runs of one record or of one study. It raises whatever MLflow raises.

    MLflow's experiment is created if it is missing. Runs of another `kind` (the tag of that name) are left alone. None
    stands for runs without it.
    """

    def __init__(
        self,
        tracking_uri: str,
        secrets: KnownSecrets,
        experiment_name: str,
        wanted: str,
        work_dir: Path,
        kind: str | None = None,
    ) -> None:
        self.secrets = secrets  # values to hide from MLflow. More may become known.
        experiment_name = secrets.hide(experiment_name)
        artifacts = artifact_location(tracking_uri, work_dir)
        if artifacts is not None:
            Path(unquote(urlsplit(artifacts).path)).mkdir(mode=OWNERS_FOLDER, parents=True, exist_ok=True)
            # Also for MLflow's default experiment, because MLflow would put the working directory into SQL unescaped.
            os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = artifacts
        with schema_lock(tracking_uri):
            self._client = _mlflow_client(tracking_uri)
            experiment = self._client.get_experiment_by_name(experiment_name)
            self.experiment_id: str = (
                self._client.create_experiment(experiment_name, artifacts)
                if experiment is None
                else experiment.experiment_id
            )
        self._tags: dict[str, str] = {} if experiment is None else experiment.tags
        if self._tags.get(_EXPERIMENT_KIND, "") in _GUESSED_KINDS:
            self.tag_experiment(_EXPERIMENT_KIND, _MODEL_TRAINING)
        if DESCRIPTION not in self._tags:
            self.tag_experiment(DESCRIPTION, _ABOUT.format(experiment_name))
        self.found: dict[str, Any] = {}  # MLflow's runs at the start, by their records' ids
        # A run whose creation was answered too late exists twice. The one in use stays.
        for run in sorted(self.search(wanted), key=lambda run: SENT not in run.data.tags):
            if run.data.tags.get(KIND) != kind:
                continue
            if run.data.tags[RECORD_ID] in self.found:
                self._client.delete_run(run.info.run_id)
                continue
            self.found[run.data.tags[RECORD_ID]] = run
        self._ids: dict[str, str] = {record_id: run.info.run_id for record_id, run in self.found.items()}

    def tag_experiment(self, name: str, value: str) -> None:
        if self._tags.get(name) != value:
            self._client.set_experiment_tag(self.experiment_id, name, value)

    def search(self, wanted: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs([self.experiment_id], wanted, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def run_of(self, content: RunContent) -> str:
        if content.record_id not in self._ids:
            content = without_secrets(content, self.secrets)
            run = self._client.create_run(
                self.experiment_id, milliseconds(content.started_at), content.tags, content.name
            )
            self._ids[content.record_id] = run.info.run_id
        return self._ids[content.record_id]

    def send(self, content: RunContent) -> None:
        from mlflow.entities import Metric, Param, RunTag

        client, run_id = self._client, self.run_of(content)
        content = without_secrets(content, self.secrets)
        # All have the time of the trial's start, because a metric that is sent again must have the same time.
        started_at = milliseconds(content.started_at)
        batches = zip_longest(
            _batches(
                [Metric(point.name, point.value, started_at, point.step) for point in content.metrics], _METRICS_BATCH
            ),
            _batches([Param(*param) for param in content.params.items()], _BATCH),
            _batches([RunTag(*tag) for tag in content.tags.items()], _BATCH),
            fillvalue=(),
        )
        for metrics, params, tags in batches:
            client.log_batch(run_id, metrics=metrics, params=params, tags=tags)
        with scratch_folder() as folder:
            for artifact in content.artifacts:
                client.log_artifact(run_id, str(shown_copy(artifact, folder, self.secrets)))
        if content.ended_at is None:
            client.update_run(run_id, content.status)
        else:
            client.set_terminated(run_id, content.status, milliseconds(content.ended_at))

    def log_metrics(self, run_id: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Sends values, each with its name, its time in milliseconds since the epoch, and its step."""
        from mlflow.entities import Metric

        for batch in _batches(points, _METRICS_BATCH):
            self._client.log_batch(run_id, metrics=[Metric(*point) for point in batch])

    def tag(self, content: RunContent, name: str, value: str) -> None:
        self._client.set_tag(self.run_of(content), name, value)

    def mark(self, run_id: str, sent: str) -> None:
        self._client.set_tag(run_id, SENT, sent)


def _mlflow_client(tracking_uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    return _Noting(MlflowClient(tracking_uri=tracking_uri))


class _Noting:
    """An MLflow client that notes when a request was answered. The limit of a request is one for each of its reads."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._client, name)

        def noted(*args: Any, **options: Any) -> Any:
            answer = request(*args, **options)
            Answers.last_at = time.monotonic()
            return answer

        return noted


@contextlib.contextmanager
def schema_lock(tracking_uri: str) -> Iterator[None]:
    """Keeps other processes from creating a SQLite store's tables at the same time. All but one would fail."""
    database = sqlite_file(tracking_uri)
    if database is None:
        yield
        return
    with FileLock(f"{database}.lock", timeout=_SCHEMA_TIMEOUT_S, mode=OWNERS_FILE):
        # SQLite gives files beside a database the database's own mode.
        make_own(database)
        yield


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def milliseconds(seconds: float) -> int:
    """MLflow's unit of time."""
    return int(seconds * 1000)
