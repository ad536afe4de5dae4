"""Full experiments' folders sent to a real MLflow store, in this process."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from zerotune.trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
)
from zerotune.trial_lib.tracking.sync import FullExperimentSync, NoStudyRunError, StudySync
from zerotune.trial_lib.tracking.tracking_uri import run_page

RECORD = FullExperimentRecord(
    experiment_id="hello-1",
    name="hello",
    model_dir="/model",
    ds_config={"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}},
    hparams={"lr": 0.1},
    started_at=1000.0,
)


@pytest.fixture
def paths(tmp_path: Path) -> FullExperimentPaths:
    paths = FullExperimentPaths(tmp_path / "hello-1")
    paths.root.mkdir()
    paths.ds_config.write_text("{}")
    paths.log.write_text("it began\n")
    write_record(paths)
    return paths


def write_record(paths: FullExperimentPaths, **changes: Any) -> None:
    paths.record.write_text(RECORD.model_copy(update=changes).model_dump_json())


def tell(path: Path, kind: str, *batches: int, **metrics: float) -> None:
    with path.open("a") as file:
        for batch in batches:
            line = {"kind": kind, "batch": batch, "time": 1000.0 + batch, "metrics": metrics or {"loss": 1.0 / batch}}
            file.write(json.dumps(line) + "\n")


def runs_of(uri: str) -> list[Run]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hello")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def steps(uri: str, name: str) -> list[int]:
    (run,) = runs_of(uri)
    return [point.step for point in MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, name)]


def test_a_run_that_runs_has_its_configuration_and_its_metrics_so_far(paths: FullExperimentPaths, store: str) -> None:
    tell(paths.metrics, "training", 1, 2)
    tell(paths.metrics, "validation", 2, validation_loss=0.5)
    tell(paths.system_metrics, "system", 2, 2, cpu_percent=50.0)
    sync = FullExperimentSync(paths, store)
    sync.run()
    (run,) = runs_of(store)
    assert (run.info.run_name, run.info.status) == ("hello-1", "RUNNING")
    assert sync.page == sync.run_page == run_page(run.info.experiment_id, run.info.run_id)
    assert run.data.params == {
        "train_batch_size": "8",
        "zero_optimization.stage": "2",
        "zero_optimization.overlap_comm": "true",
        "zero_stage": "2",
        "hyperparameters.lr": "0.1",
        "model_dir": "/model",
    }
    assert (run.data.tags["kind"], run.data.tags["record_id"]) == ("full_experiment", "hello-1")
    assert run.data.metrics == {"training.loss": 0.5, "validation.validation_loss": 0.5, "system.cpu_percent": 50.0}
    (point,) = MlflowClient(tracking_uri=store).get_metric_history(run.info.run_id, "validation.validation_loss")
    assert (point.step, point.timestamp) == (2, 1_002_000)


def test_one_that_has_ended_has_its_answer_and_its_log(paths: FullExperimentPaths, store: str) -> None:
    sync = FullExperimentSync(paths, store)
    sync.run()
    ended = {"best_checkpoint": "batch-00000002", "best_metric": 0.25, "batches": 4}
    write_record(paths, status=StudyStatus.COMPLETED, ended_at=2000.0, **ended)
    sync.run()
    (run,) = runs_of(store)
    assert (run.info.status, run.info.end_time) == ("FINISHED", 2_000_000)
    assert {name: run.data.tags[name] for name in ended} == {
        "best_checkpoint": "batch-00000002",
        "best_metric": "0.25",
        "batches": "4",
    }
    assert "hello-1/checkpoints/batch-00000002" in run.data.tags["mlflow.note.content"]
    files = {file.path for file in MlflowClient(tracking_uri=store).list_artifacts(run.info.run_id)}
    assert files == {"ds_config.json"}


def test_what_grows_is_sent_as_it_grows_and_repeated_batches_once(paths: FullExperimentPaths, store: str) -> None:
    sync = FullExperimentSync(paths, store)
    for batches in ([1, 2, 3], [3, 4], [2, 3, 4, 5]):
        tell(paths.metrics, "training", *batches)
        sync.run()
    assert steps(store, "training.loss") == [1, 2, 3, 4, 5]


def test_another_driver_sends_what_is_new_into_the_same_run(
    paths: FullExperimentPaths, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(paths.metrics, "training", 1, 2, 3)
    FullExperimentSync(paths, store).run()
    sent: list[int] = []
    log_batch = MlflowClient.log_batch

    def counted(client: MlflowClient, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        sent.extend(metric.step for metric in metrics)
        return log_batch(client, run_id, metrics=metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", counted)
    write_record(paths, hparams={"lr": 0.2})  # a param is there once and for all
    tell(paths.metrics, "training", 3, 4)
    FullExperimentSync(paths, store).run()
    assert sent == [4]
    assert steps(store, "training.loss") == [1, 2, 3, 4]
    assert runs_of(store)[0].data.params["hyperparameters.lr"] == "0.1"


def test_what_was_sent_and_not_marked_is_sent_again_and_is_there_once(paths: FullExperimentPaths, store: str) -> None:
    tell(paths.metrics, "training", 1, 2)
    FullExperimentSync(paths, store).run()
    (run,) = runs_of(store)
    MlflowClient(tracking_uri=store).delete_tag(run.info.run_id, "sent")
    tell(paths.metrics, "training", 3)
    FullExperimentSync(paths, store).run()
    assert steps(store, "training.loss") == [1, 2, 3]


def test_a_file_that_has_become_shorter_is_sent_from_its_beginning(paths: FullExperimentPaths, store: str) -> None:
    tell(paths.metrics, "training", 1, 2, 3)
    FullExperimentSync(paths, store).run()
    paths.metrics.unlink()
    tell(paths.metrics, "training", 1, 2)
    sync = FullExperimentSync(paths, store)
    sync.run()
    tell(paths.metrics, "training", 3, 4)
    sync.run()
    assert steps(store, "training.loss") == [1, 2, 3, 4]


def test_what_is_not_finite_and_damaged_lines_are_left_out(paths: FullExperimentPaths, store: str) -> None:
    tell(paths.metrics, "training", 1, **{"loss": float("nan"), "odd(name)": 2.0})
    with paths.metrics.open("a") as file:
        file.write("{damaged\n")
    tell(paths.metrics, "training", 2)
    FullExperimentSync(paths, store).run()
    assert steps(store, "training.loss") == [2]
    assert steps(store, "training.odd_name_") == [1]


def test_a_study_s_full_experiment_is_its_child_and_the_study_leaves_it_alone(
    paths: FullExperimentPaths, store: str, tmp_path: Path
) -> None:
    write_record(paths, study_id="study-1")
    with pytest.raises(NoStudyRunError):
        FullExperimentSync(paths, store).run()
    study = StudyPaths(tmp_path / "study-1")
    study.trials.mkdir(parents=True)
    study.record.write_text(
        StudyRecord(study_id="study-1", name="hello", method="asha", metric="throughput").model_dump_json()
    )
    StudySync(study, store).run()
    FullExperimentSync(paths, store).run()
    StudySync(study, store).run()
    runs = {run.data.tags["record_id"]: run for run in runs_of(store)}
    assert set(runs) == {"study-1", "hello-1"}
    assert runs["hello-1"].data.tags["mlflow.parentRunId"] == runs["study-1"].info.run_id
    assert runs["hello-1"].data.tags["study_id"] == "study-1"
