"""A confirmation that is cut is recorded as cut, for the report, `show` and MLflow."""

import json
from pathlib import Path

import pytest
from simulated_studies import CutShortError, Experiment

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyStatus
from zerotune.trial_lib.report.html_report import write_report
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.study.confirm import answer_of
from zerotune.trial_lib.study.open_study import OpenStudy
from zerotune.trial_lib.tracking.run_content import study_description


@pytest.fixture
def team(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path)


def cut(team: Experiment, study: OpenStudy, confirming: int) -> None:
    """Runs a study until so many confirming trials have ended."""
    end = study.driver.tell

    def tell(result: object) -> None:
        end(result)  # type: ignore[arg-type]
        if team.purposes.count(Purpose.CONFIRM) == confirming:
            raise CutShortError

    study.driver.tell = tell  # type: ignore[method-assign]
    with pytest.raises(CutShortError):
        team.finish(study)


def said_of(study: OpenStudy) -> list[str]:
    """Returns what is said of a study: in `show`, the report and MLflow."""
    paths = study.paths
    write_report(paths)
    measured = json.loads(paths.best_ds_metrics.read_text()) if paths.best_ds_metrics.exists() else {}
    description = study_description(study.record, paths, measured)
    return [read_study(paths.root).reason, paths.report.read_text(), description]


@pytest.mark.parametrize(
    ("confirming", "rounds"), [(1, "0 complete rounds"), (2, "1 complete round"), (5, "2 complete")]
)
def test_a_confirmation_that_had_no_more_time_says_so_everywhere(
    team: Experiment, monkeypatch: pytest.MonkeyPatch, confirming: int, rounds: str
) -> None:
    team.scatter = 0.3  # nothing separates before the last look
    with team.opened(from_earlier=False, max_minutes=60) as study:
        cut(team, study, confirming)
        monkeypatch.setattr(type(study.driver.time), "is_over", True)
        answer = answer_of(study.driver)
        assert answer is not None
        assert (answer.finding is None) == (confirming < 4)
        study.finish(StudyStatus.COMPLETED)
    said = said_of(study)
    assert rounds in said[0]
    assert all("The confirmation was cut after" in each for each in said)
    assert all("the minutes of --max-minutes were over" in each for each in said)


def test_an_interrupted_confirmation_says_so_and_a_resumed_one_does_not(
    team: Experiment, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    with team.opened(from_earlier=False) as study:
        cut(team, study, 3)
        study.finish(StudyStatus.CANCELLED, "interrupted")
    sentence = "interrupted. The confirmation was cut after 1 complete round, because the study was interrupted."
    assert all(sentence in each for each in said_of(study))
    with team.resumed(study.paths.root) as resumed:
        resumed.begin()
        team.finish(resumed)
    assert resumed.record.reason == ""


def test_an_interrupted_search_has_cut_no_confirmation(team: Experiment) -> None:
    with team.opened(from_earlier=False) as study:
        with pytest.raises(CutShortError):
            team.finish(study, trials=3)
        study.finish(StudyStatus.CANCELLED, "interrupted")
    assert study.record.reason == "interrupted"
