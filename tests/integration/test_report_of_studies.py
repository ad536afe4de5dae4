"""Real studies that come to their end leave a report, and MLflow has it with its figures."""

import signal
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from study_fixtures import Zerotune

FIGURES = {"throughput.html", "memory.html", "progress.html", "knobs.html"}
pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    return Zerotune(tmp_path, home)


def test_a_finished_study_s_report_is_in_its_folder_and_in_mlflow(zerotune: Zerotune) -> None:
    ran = zerotune.run("adaptive", "--max-trials", "6", "--max-micro-batch", "8")
    assert ran.returncode == 0, ran.stderr
    paths = zerotune.study.paths
    assert f"Report:        {paths.report}" in ran.stderr
    assert zerotune.study.record["finding"] in paths.report.read_text()
    client = MlflowClient(f"sqlite:///{zerotune.folder / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == zerotune.study.record["name"]]
    (parent,) = client.search_runs([experiment.experiment_id], "tags.finding LIKE '%'")
    files = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert files >= {"report.html", "best_ds_config.json", "throughput.html", "memory.html", "progress.html"}
    assert files & FIGURES == {file.name for file in paths.figures.iterdir()}
    description = parent.data.tags["mlflow.note.content"]
    assert description.startswith(f"**{zerotune.study.record['finding']}**")
    for said in ("deepspeed train.py", "samples/s", "best_ds_config.json", "report.html"):
        assert said in description
    trials = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    axes = {"zero_stage", "micro_batch_size", "zero_optimization.reduce_bucket_size"}
    assert all(axes <= trial.data.params.keys() for trial in trials)


def test_a_study_that_found_nothing_has_a_report_that_says_why(zerotune: Zerotune) -> None:
    (zerotune.model / "train.py").write_text("raise ValueError('no <data> here')\n")
    assert zerotune.run("adaptive", "--max-trials", "4").returncode == 1
    page = zerotune.study.paths.report.read_text()
    assert "No configuration was found." in page
    assert "no &lt;data&gt; here" in page


def test_an_interrupted_study_is_shown_as_far_as_it_came(zerotune: Zerotune) -> None:
    running = zerotune.start("adaptive", "--max-trials", "20")
    studies = zerotune.folder / "zerotune-studies"
    running.wait_until(lambda: list(studies.glob("*/trials/0001/result.json")), "result", 120)
    running.process.send_signal(signal.SIGINT)
    assert running.end().returncode == 130
    assert "Cancelled: " in zerotune.run("show").stdout
