"""How far off the plan was, in the report, the terminal, the JSON document and MLflow."""

import io

import pytest
from rich.console import Console

from tests.report_fixtures import recorded_study, with_results
from zerotune.trial_lib.plan.plan_record import PlannedTrial, PlannedTrials
from zerotune.trial_lib.records.folders import StudyRecord
from zerotune.trial_lib.report.html_report import render_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.tables import planned_rows, print_study
from zerotune.trial_lib.tracking.run_content import study_content, trial_content

GIB = 2**30
PLANNED = PlannedTrials(
    plan_id="llama-8b-20261126-150000-37dd",
    devices="h100-80gb:2",
    is_here=True,
    trials=(
        PlannedTrial(
            number=2,
            label="z3<b>",
            micro_batch=4,
            memory=10 * GIB,
            measured_memory=12 * GIB,
            samples_per_s=122.0,
            low=100.0,
            high=150.0,
            measured_samples_per_s=100.0,
        ),
        PlannedTrial(number=3, label="z1", micro_batch=64, memory=90 * GIB),
    ),
)
SENTENCE = "The plan was 17 % off in memory and 22 % too fast."


@pytest.fixture
def paths(tmp_path):
    paths = with_results(recorded_study(tmp_path))
    paths.planned_trials.write_text(PLANNED.model_dump_json())
    return paths


def test_a_row_has_foreseen_measured_and_the_difference():
    first, second = planned_rows(PLANNED)
    assert first[3:] == ("10.0 GiB", "12.0 GiB", "-17 %", "122.0 (100.0 to 150.0)", "100.0", "+22 %")
    assert second[3:] == ("90.0 GiB", "-", "-", "-", "-", "-")


def test_the_report_has_a_section_with_the_sentence_and_each_trial(paths):
    page = render_report(read_study(paths.root), [])
    assert "How far off the plan was" in page
    assert SENTENCE in page
    assert "-17 %" in page
    assert "z3&lt;b&gt;" in page
    paths.planned_trials.unlink()
    assert "How far off the plan was" not in render_report(read_study(paths.root), [])


def test_the_terminal_and_json_say_the_same(paths):
    view, out = read_study(paths.root), io.StringIO()
    print_study(view, Console(file=out, width=200))
    assert SENTENCE in out.getvalue()
    assert "122.0 (100.0 to 150.0)" in out.getvalue()
    assert view.document()["planned"]["sentence"] == SENTENCE
    assert len(view.document()["planned"]["trials"]) == 2


def test_mlflow_has_it_with_the_study_and_with_each_trial(paths):
    record = StudyRecord.model_validate_json(paths.record.read_text())
    study = study_content(record, paths)
    metrics = {metric.name: metric.value for metric in study.metrics}
    assert metrics["plan.memory_error"] == pytest.approx(1 / 6)
    assert metrics["plan.speed_error"] == pytest.approx(0.22)
    assert SENTENCE in study.tags["mlflow.note.content"]
    trial = {metric.name: metric.value for metric in trial_content(record, paths.trial(2), "parent").metrics}
    assert (trial["foreseen.memory"], trial["foreseen.throughput"]) == (10 * GIB, 122.0)
    other = {metric.name for metric in trial_content(record, paths.trial(4), "parent").metrics}
    assert "foreseen.memory" not in other
