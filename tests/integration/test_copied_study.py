"""A copy of a study's folder has runs of its own in MLflow: the original's stay what they are."""

import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from study_fixtures import Study, Zerotune
from test_tracking import add_trial, new_study
from worker_fixtures import is_training

from zerotune.flows.prefect_server import PrefectServer
from zerotune.flows.records import sync_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import FullExperimentPaths, FullExperimentRecord, StudyPaths, whereabouts_of
from zerotune.trial_lib.study.folder import hold_lock, read_record, write_record


def runs_by_study(uri: str, name: str) -> dict[str, list[Run]]:
    """Returns the runs under each parent, by the parent's record."""
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = {run.info.run_id: run.data.tags["record_id"] for run in runs if "mlflow.parentRunId" not in run.data.tags}
    found: dict[str, list[Run]] = {study: [] for study in parents.values()}
    for run in runs:
        if run.info.run_id not in parents:
            found[parents[run.data.tags["mlflow.parentRunId"]]].append(run)
    return found


@pytest.fixture
def original(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> StudyPaths:
    """A study with two trials that MLflow has."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    paths = new_study(tmp_path / "zerotune-studies", trials=2)
    write_record(paths, read_record(paths).model_copy(update={"whereabouts": whereabouts_of(paths.root)}))
    assert sync_command(paths.root) == 0
    return paths


def test_a_copy_that_has_gone_another_way_is_sent_beside_its_original(
    original: StudyPaths, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = StudyPaths(original.root.with_name("copy"))
    shutil.copytree(original.root, copy.root)
    add_trial(original, 2)
    assert sync_command(original.root) == 0
    # The same number, another candidate: MLflow does not change a param.
    add_trial(copy, 2)
    shutil.rmtree(copy.trial(2).root)
    add_trial(copy, 3)
    copy.trial(3).root.rename(copy.trial(2).root)
    capsys.readouterr()
    for _ in range(2):
        assert sync_command(copy.root) == 0
        assert sync_command(original.root) == 0
    said = capsys.readouterr().err
    assert said.count("this folder is a copy of hello-1") == 1
    runs = runs_by_study(store, "hello")
    own_id = read_record(copy).study_id
    assert set(runs) == {"hello-1", own_id}
    sizes = {study: sorted(run.data.params["micro_batch_size"] for run in under) for study, under in runs.items()}
    assert sizes == {"hello-1": ["1", "2", "3"], own_id: ["1", "2", "4"]}


def test_a_copy_s_training_at_full_length_has_a_run_of_its_own(original: StudyPaths, store: str) -> None:
    trained = FullExperimentPaths(original.full_experiment.root)
    trained.root.mkdir()
    record = FullExperimentRecord(experiment_id="e", name="hello").of_study("hello-1")
    trained.record.write_text(record.model_dump_json())
    assert sync_command(original.root) == 0
    copy = StudyPaths(original.root.with_name("copy"))
    shutil.copytree(original.root, copy.root)
    assert sync_command(copy.root) == 0
    kinds = {
        study: Counter(run.data.tags.get("kind") for run in runs)
        for study, runs in runs_by_study(store, "hello").items()
    }
    assert kinds == {study: {None: 2, "full_experiment": 1} for study in ("hello-1", read_record(copy).study_id)}


def test_a_copy_that_another_process_drives_is_left_alone(original: StudyPaths) -> None:
    copy = StudyPaths(original.root.with_name("copy"))
    shutil.copytree(original.root, copy.root)
    held = hold_lock(copy.lock, "study")
    try:
        with pytest.raises(InputError, match="another process drives this study"):
            sync_command(copy.root)
    finally:
        held.release()
    assert read_record(copy).study_id == "hello-1"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_interrupted_study_and_its_copy_are_resumed_side_by_side(
    tmp_path: Path, home: Path, store: str, server: PrefectServer
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    zerotune = Zerotune(folder, home, program="--largest_micro_batch 40 --num_steps 20 --step_seconds 0.05")
    named = {"PREFECT_API_URL": server.api_url, "MLFLOW_TRACKING_URI": store}
    command = zerotune.start("binary", "-mt", "4", "-z", "1", "-mct", "1", **named)
    command.wait_until(lambda: is_training(zerotune, 2), "trial 2", 240)
    command.process.send_signal(signal.SIGINT)
    command.end()
    original = zerotune.study
    copy = Study(original.paths.root.with_name("copy"))
    shutil.copytree(original.paths.root, copy.paths.root)
    for study in (copy, original):
        resumed = zerotune.run("resume", study.paths.root, **named)
        assert resumed.returncode in (0, 1), resumed.stderr
        assert "Some records have not reached MLflow" not in resumed.stderr
        assert ("is a copy of" in resumed.stderr) == (study is copy)
    runs = runs_by_study(store, "tiny")
    for study in (copy, original):
        trials = sorted(int(run.data.tags["trial"]) for run in runs[study.record["study_id"]])
        assert trials == sorted(study.results)
    assert len(runs) == 2
