"""Studies' folders sent to a real MLflow: a SQLite store, and a server."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from server_fixtures import free_port

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord, StudyStatus
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.tracking.run_content import ORDER
from zerotune.trial_lib.tracking.sync import StudySync, Tracker, trials_view
from zerotune.trial_lib.tracking.tracking_uri import default_tracking_uri

SYNC = """
import sys
from pathlib import Path
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.tracking.sync import StudySync
print("ready", flush=True)
StudySync(StudyPaths(Path(sys.argv[1])), sys.argv[2]).run()
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    options += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server is not ready after a minute")


def new_study(folder: Path, trials: int, study_id: str = "hello-1", **changes: Any) -> StudyPaths:
    """Writes the folder of a study, as a driver writes it; the last trial is the fastest."""
    paths = StudyPaths(folder / study_id)
    paths.trials.mkdir(parents=True)
    record = StudyRecord(
        study_id=study_id, name="hello", method="asha", metric="throughput", started_at=1000.0, ds_config={}
    )
    paths.record.write_text(record.model_copy(update=changes).model_dump_json())
    for number in range(trials):
        add_trial(paths, number)
    return paths


def add_trial(paths: StudyPaths, number: int, outcome: Outcome = Outcome.COMPLETED, ended: bool = True) -> None:
    trial = paths.trial(number)
    trial.root.mkdir()
    candidate = Candidate(
        knobs={"zero_optimization": {"stage": number % 4}}, micro_batch_size=number + 1, data_parallel_size=2
    )
    trial.candidate.write_text(candidate.model_dump_json())
    trial.ds_config.write_text(json.dumps(candidate.complete({})))
    trial.log(0).write_text("step 1\n")
    result = TrialResult(
        trial_id=f"{paths.root.name}/{number:04d}",
        number=number,
        purpose=Purpose.SEARCH,
        config_hash=candidate.config_hash({}),
        outcome=outcome,
        metrics={"throughput": 10.0 * number} if outcome is Outcome.COMPLETED else {},
        step_times=[0.1] * 3,
        memory=Memory(peak=[100, 200]),
        logs=[str(trial.log(0))],
        started_at=1001.0 + number,
    )
    if ended:
        trial.result.write_text(result.to_text())


def finish(paths: StudyPaths, best_number: int) -> None:
    paths.best_ds_config.write_text("{}")
    paths.best_ds_metrics.write_text(json.dumps({"metrics": {"throughput": 10.0 * best_number}}))
    paths.best_command.write_text("deepspeed train.py\n")
    record = StudyRecord.model_validate_json(paths.record.read_text())
    ended = {"status": StudyStatus.COMPLETED, "best_number": best_number, "gain": 1.5, "ended_at": 2000.0}
    paths.record.write_text(record.model_copy(update=ended).model_dump_json())


def runs_of(uri: str, study_id: str = "hello-1") -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hello")
    return list(client.search_runs([experiment.experiment_id], f"tags.study_id = '{study_id}'"))


def parent_of(runs: list[Run]) -> Run:
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    return parent


def files_of(uri: str, run: Run) -> set[str]:
    return {file.path for file in MlflowClient(tracking_uri=uri).list_artifacts(run.info.run_id)}


def assert_there_once(uri: str, trials: int, study_id: str = "hello-1") -> None:
    runs = runs_of(uri, study_id)
    ids = Counter(run.data.tags["record_id"] for run in runs)
    assert ids == {study_id: 1, **{f"{study_id}/{number:04d}": 1 for number in range(trials)}}
    parent = parent_of(runs)
    client = MlflowClient(tracking_uri=uri)
    for run in runs:
        if run is parent:
            continue
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.params["micro_batch_size"] == str(int(run.data.tags["trial"]) + 1)
        assert len(client.get_metric_history(run.info.run_id, "step_time")) == 3
        assert len(client.get_metric_history(run.info.run_id, "throughput")) == 1
        assert files_of(uri, run) == {"ds_config.json", "result.json"}


@pytest.mark.parametrize("where", ["store", pytest.param("server", marks=pytest.mark.long)])
def test_all_of_a_study_arrives(where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    uri = request.getfixturevalue(where)
    paths = new_study(tmp_path, trials=3, study_id="whole")
    finish(paths, best_number=2)
    StudySync(paths, uri).run()
    assert_there_once(uri, 3, "whole")
    parent = parent_of(runs_of(uri, "whole"))
    assert parent.info.status == "FINISHED"
    assert parent.info.end_time == 2_000_000
    shown = {name: value for name, value in parent.data.metrics.items() if name != ORDER}
    assert shown == {"throughput": 20.0, "samples_per_s": 20.0, "gain": 1.5}
    assert [run.data.tags["trial"] for run in runs_of(uri, "whole") if "winner" in run.data.tags] == ["0002"]
    assert parent.data.tags["mlflow.note.content"].startswith("**1.50x faster than your configuration")
    assert files_of(uri, parent) == {
        "best_ds_config.json",
        "best_ds_metrics.json",
    }


def test_artifacts_stand_beside_the_store(store: str, tmp_path: Path) -> None:
    StudySync(new_study(tmp_path, trials=1), store).run()
    assert len(list((tmp_path / "mlartifacts").glob("*/artifacts/result.json"))) == 1


def test_sent_twice_it_is_there_once(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=3)
    StudySync(paths, store).run()
    StudySync(paths, store).run()
    assert_there_once(store, 3)


def test_what_grows_is_sent_as_it_grows(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=1)
    add_trial(paths, 1, ended=False)
    StudySync(paths, store).run()
    assert_there_once(store, 1)
    assert parent_of(runs_of(store)).info.status == "RUNNING"
    (paths.trial(1).root.rename(tmp_path / "unfinished"))
    add_trial(paths, 1)
    finish(paths, best_number=1)
    StudySync(paths, store).run()
    assert_there_once(store, 2)
    assert parent_of(runs_of(store)).info.status == "FINISHED"


def test_a_trial_that_ran_again_after_a_resume_is_sent_again(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=0)
    add_trial(paths, 0, outcome=Outcome.CANCELLED)
    StudySync(paths, store).run()
    paths.trial(0).root.rename(tmp_path / "cancelled")
    add_trial(paths, 0)
    StudySync(paths, store).run()
    assert_there_once(store, 1)


def test_a_profile_is_shown_as_its_last_attempt_ended(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=0)
    add_trial(paths, 0, outcome=Outcome.CRASHED)
    sync = StudySync(paths, store)
    sync.run()
    paths.trial(0).root.rename(tmp_path / "first attempt")
    add_trial(paths, 0)
    add_trial(paths, 1, ended=False)
    sync.run()
    assert_there_once(store, 1)


def test_a_run_that_was_created_twice_is_there_once(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=1)
    StudySync(paths, store).run()
    parent = parent_of(runs_of(store))
    tags = {"study_id": "hello-1", "record_id": "hello-1/0000", "mlflow.parentRunId": parent.info.run_id}
    MlflowClient(tracking_uri=store).create_run(parent.info.experiment_id, tags=tags)
    StudySync(paths, store).run()
    assert_there_once(store, 1)


def test_the_experiment_is_one_of_model_training_and_has_a_view_of_the_trials(store: str, tmp_path: Path) -> None:
    client = MlflowClient(tracking_uri=store)
    client.create_experiment("hello", tags={"mlflow.experimentKind": "genai_development_inferred"})
    record = StudyRecord.model_validate_json(new_study(tmp_path, trials=2).record.read_text())
    StudySync(StudyPaths(tmp_path / "hello-1"), store).run()
    name, value = trials_view(record)
    experiment = client.get_experiment_by_name("hello")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert experiment.tags[name] == value
    shown = json.loads(json.loads(value)["state"])
    order = "DESC" if not shown["orderByAsc"] else "ASC"
    runs = client.search_runs(
        [experiment.experiment_id], shown["searchFilter"], order_by=[f"{shown['orderByKey']} {order}"]
    )
    # The study's own run has no measurement yet, so it comes last.
    assert [run.data.tags.get("trial") for run in runs] == ["0001", "0000", None]
    assert runs[0].data.metrics["samples_per_s"] == runs[0].data.metrics["throughput"]
    assert "hello" in experiment.tags["mlflow.note.content"]


def test_a_kind_that_a_person_has_chosen_stays(store: str, tmp_path: Path) -> None:
    client = MlflowClient(tracking_uri=store)
    client.create_experiment("hello", tags={"mlflow.experimentKind": "finetuning"})
    StudySync(new_study(tmp_path, trials=1), store).run()
    assert client.get_experiment_by_name("hello").tags["mlflow.experimentKind"] == "finetuning"


def test_the_best_trial_is_found_by_its_parent(store: str, tmp_path: Path) -> None:
    StudySync(new_study(tmp_path, trials=4), store).run()
    parent = parent_of(runs_of(store))
    children = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    [best] = MlflowClient(tracking_uri=store).search_runs(
        [parent.info.experiment_id], children, order_by=["metrics.throughput DESC"], max_results=1
    )
    assert best.data.tags["trial"] == "0003"


@pytest.mark.long
def test_killed_again_and_again_it_is_there_once(server: str, tmp_path: Path) -> None:
    trials, draw = 12, random.Random(0)
    paths = new_study(tmp_path, trials, study_id="killed")
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", SYNC, paths.root, server], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.uniform(1.0, 3.0))  # MLflow's import takes the first second
            process.kill()
    StudySync(paths, server).run()
    assert_there_once(server, trials, "killed")


@pytest.mark.long
def test_several_processes_may_create_the_store(tmp_path: Path) -> None:
    studies = [new_study(tmp_path, 1, study_id=f"hello-{number}") for number in range(3)]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    processes = [
        subprocess.Popen([sys.executable, "-c", SYNC, study.root, uri], stdout=subprocess.DEVNULL) for study in studies
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    for study in studies:
        assert_there_once(uri, 1, study.root.name)


@pytest.mark.long
@pytest.mark.alone
def test_a_server_that_is_away_holds_nothing_up(store: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=2)
    away = f"http://127.0.0.1:{free_port()}"
    tracker = Tracker(lambda: StudySync(paths, away), away)
    tracker.start()
    started = time.monotonic()
    tracker.notify()
    assert time.monotonic() - started < 0.1
    started = time.monotonic()
    assert not tracker.close(timeout_s=2)
    assert time.monotonic() - started < 3
    assert tracker.last_error is not None
    StudySync(paths, store).run()
    assert_there_once(store, 2)


@pytest.mark.long
@pytest.mark.alone
def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        paths, uri = new_study(tmp_path, trials=1), f"http://127.0.0.1:{silent.getsockname()[1]}"
        tracker = Tracker(lambda: StudySync(paths, uri), uri)
        tracker.start()
        started = time.monotonic()
        assert not tracker.close(timeout_s=1)
        assert time.monotonic() - started < 2


@pytest.mark.long
def test_the_tracker_sends_what_is_there_at_close(server: str, tmp_path: Path) -> None:
    paths = new_study(tmp_path, trials=1, study_id="tracked")
    tracker = Tracker(lambda: StudySync(paths, server), server)
    assert tracker.ways == (server,)
    tracker.start()
    for number in range(1, 4):
        add_trial(paths, number)
        tracker.notify()
    finish(paths, best_number=3)
    tracker.notify()
    assert tracker.close(timeout_s=30)
    assert tracker.last_error is None
    assert_there_once(server, 4, "tracked")
    parent = parent_of(runs_of(server, "tracked"))
    assert parent.info.status == "FINISHED"
    experiment = f"{server}/#/experiments/{parent.info.experiment_id}/runs"
    assert tracker.run_ways == (f"{experiment}/{parent.info.run_id}?workflowType=machine_learning",)
    [trials] = tracker.ways
    assert trials.startswith(f"{experiment}?")
    assert trials.endswith("viewStateShareKey=tracked")


@pytest.mark.long
@pytest.mark.parametrize("name", ["it's what? a#b 100%", "ünï " + "x" * 120])
def test_a_folder_may_be_called_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / name
    paths = new_study(folder / "zerotune-studies", trials=1)
    monkeypatch.chdir(folder)
    StudySync(paths, default_tracking_uri(folder)).run()
    assert (folder / "mlflow.db").stat().st_mode & 0o077 == 0
    assert (folder / "mlartifacts").stat().st_mode & 0o077 == 0
    assert len(list((folder / "mlartifacts").rglob("ds_config.json"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
