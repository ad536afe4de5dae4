"""Where the time of a step goes, in the report, the terminal, the JSON document and MLflow."""

import io
import json

import pytest
from rich.console import Console

from tests.report_fixtures import recorded_study, with_results
from zerotune.trial_lib.records.folders import StudyRecord
from zerotune.trial_lib.records.step_account import StepAccount
from zerotune.trial_lib.report.html_report import render_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.tables import print_study
from zerotune.trial_lib.tracking.run_content import study_content, trial_content

WINNER = StepAccount(
    name="ZeRO 0 <b>",
    role="winner",
    basis="traced",
    trial=28,
    seconds=0.25,
    shares={"compute": 0.7, "gathering": 0.3},
    advice="Waiting for gathered parameters takes 30 % of it: try this.",
)
OWN = StepAccount(name="your configuration", role="own", basis="none", failure="No trial of it was traced.")
ARM = StepAccount(name="z2", role="arm", basis="foreseen", seconds=0.5, shares={"compute": 1.0})


@pytest.fixture
def paths(tmp_path):
    paths = with_results(recorded_study(tmp_path))
    answer = json.loads(paths.best_ds_metrics.read_text())
    answer["why"] = [account.document() for account in (WINNER, OWN, ARM)]
    paths.best_ds_metrics.write_text(json.dumps(answer))
    return paths


def test_the_report_has_a_section_with_sentences_and_a_table(paths):
    page = render_report(read_study(paths.root), [])
    assert "Where the time goes" in page
    assert "30 % waiting for gathered parameters (traced in trial 0028). Waiting for gathered" in page
    assert "with your configuration: No trial of it was traced." in page
    assert "ZeRO 0 &lt;b&gt;" in page
    assert "z2 (foreseen)" in page
    assert '<td class="n" data-label="gathering">30 %</td>' in page
    assert 'data-label="data"' not in page


def test_a_study_of_an_earlier_version_has_no_such_section(paths):
    answer = json.loads(paths.best_ds_metrics.read_text())
    for why in (None, "text", [{"name": 1}], {}):
        paths.best_ds_metrics.write_text(json.dumps({**answer, "why": why}))
        view = read_study(paths.root)
        assert view.why == ()
        assert "Where the time goes" not in render_report(view, [])
        study_content(StudyRecord.model_validate_json(paths.record.read_text()), paths)


def test_the_terminal_and_json_say_the_same(paths):
    view, out = read_study(paths.root), io.StringIO()
    print_study(view, Console(file=out, width=300))
    assert WINNER.sentences in out.getvalue()
    assert OWN.sentence in out.getvalue()
    assert view.document()["why"][0]["sentence"] == WINNER.sentence
    assert view.document()["why"][0]["shares"] == WINNER.shares


def test_mlflow_has_sentences_and_shares(paths):
    record = StudyRecord.model_validate_json(paths.record.read_text())
    study = study_content(record, paths)
    metrics = {metric.name: metric.value for metric in study.metrics}
    assert (metrics["time.compute"], metrics["time.gathering"]) == (0.7, 0.3)
    assert not any(name.startswith("submitted.time") for name in metrics)
    assert study.tags["why"].startswith(WINNER.sentence)
    assert WINNER.sentences in study.tags["mlflow.note.content"]
    trial = paths.trial(2)
    result = json.loads(trial.result.read_text())
    trial.result.write_text(
        json.dumps({**result, "traced": {"seconds": 2.0, "parts": {"compute": 1.5, "data": 0.5}, "steps": 1}})
    )
    found = {metric.name: metric.value for metric in trial_content(record, trial, "parent").metrics}
    assert (found["time.compute"], found["time.data"]) == (0.75, 0.25)
