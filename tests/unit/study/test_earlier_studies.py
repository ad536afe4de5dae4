"""Which earlier studies count, and what a new one keeps of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from simulated_studies import CutShortError, Experiment, larger_is_faster

from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.earlier import earlier_studies_of, find_earlier_studies


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """An experiment that was tuned twice; the second study ended early."""
    experiment = Experiment(tmp_path_factory.mktemp("team"))
    experiment.tune()
    experiment.tune()
    return experiment


def studies_of(team: Experiment) -> list[StudyPaths]:
    folders = (team.folder / "zerotune-studies").iterdir()
    return sorted(map(StudyPaths, folders), key=lambda paths: json.loads(paths.record.read_text())["started_at"])


def found_by(team: Experiment, name: str = "team", **told: Any) -> list[str]:
    found = find_earlier_studies(team.folder / "zerotune-studies", name, team.arguments(**told))
    return [study.study_id for study in found]


def test_the_completed_studies_of_the_experiment_count_oldest_first(team: Experiment) -> None:
    assert found_by(team) == [paths.root.name for paths in studies_of(team)]
    assert found_by(team, name="another") == []


@pytest.mark.parametrize(
    "told",
    [{"metric": "latency"}, {"free_batch": True}, {"max_micro_batch": 2}, {"zero_stages": (1,)}, {"divisible_by": 2}],
    ids=lambda told: next(iter(told)),
)
def test_a_study_that_was_asked_something_else_does_not(team: Experiment, told: dict[str, Any]) -> None:
    assert found_by(team, **told) == []


def test_one_with_another_seed_or_budget_does(team: Experiment) -> None:
    assert len(found_by(team, random_seed=1, max_trials=30)) == 2


def test_one_that_was_resumed_after_its_code_had_changed_says_so_and_does_not(tmp_path: Path) -> None:
    team = Experiment(tmp_path)
    with pytest.raises(CutShortError), team.opened() as study:
        team.finish(study, trials=3)
    (team.model / "train.py").write_text("print('trains otherwise')\n")
    with team.resumed(study.paths.root) as resumed:
        team.finish(resumed)
    said = "changed since the study began: train.py (edited). Its earlier trials"
    assert said in resumed.paths.log.read_text()
    # The command prints these.
    assert any(said in note for note in resumed.driver.setup.experiment.notes)
    assert found_by(team) == []


def test_one_that_was_resumed_as_it_was_does(tmp_path: Path) -> None:
    team = Experiment(tmp_path)
    with pytest.raises(CutShortError), team.opened() as study:
        team.finish(study, trials=3)
    with team.resumed(study.paths.root) as resumed:
        team.finish(resumed)
    assert "changed since" not in resumed.paths.log.read_text()
    assert found_by(team) == [study.paths.root.name]


def test_the_winner_comes_with_all_that_confirmed_it(team: Experiment) -> None:
    first, second = find_earlier_studies(team.folder / "zerotune-studies", "team", team.arguments())
    for study in (first, second):
        assert study.winner == "other"
        assert study.best.candidate.micro_batch_size == 4
        assert study.own is not None
        assert len(study.best.trials) == len(study.own.trials) == 3
        assert study.best.median.metrics["throughput"] == pytest.approx(400, rel=0.05)
        assert study.fingerprint.versions["torch"] == "2.6.0"
    assert first.trials
    assert not second.trials


def test_studies_that_are_unfinished_damaged_or_of_an_older_version_are_passed_over(
    team: Experiment, tmp_path: Path
) -> None:
    paths = studies_of(team)[0]

    def without(file: Path, text: str | None) -> int:
        whole = file.read_text()
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        try:
            return len(found_by(team))
        finally:
            file.write_text(whole)

    record = paths.record.read_text()
    assert without(paths.record, record.replace('"completed"', '"cancelled"')) == 1
    assert without(paths.record, record[:100]) == 1
    assert without(paths.fingerprint, None) == 1
    assert without(paths.history, "what\n") == 1
    answer = json.loads(paths.best_ds_metrics.read_text())
    assert without(paths.best_ds_metrics, json.dumps({**answer, "confirmation": None})) == 1
    assert len(found_by(team)) == 2


def test_a_study_keeps_what_it_began_with(team: Experiment) -> None:
    with team.opened() as study:
        kept = earlier_studies_of(study.paths)
        assert [one.study_id for one in kept] == found_by(team)
        assert study.driver.advice.head_start.earlier == kept
        # What only their own study has a use for is left out.
        assert not any(trial.result.step_times or trial.result.logs for one in kept for trial in one.trials)


def test_a_regression_is_a_new_beginning(tmp_path: Path) -> None:
    team = Experiment(tmp_path)
    for _ in range(2):
        team.tune()
    team.speed = lambda candidate: 0.6 * larger_is_faster(candidate)
    assert team.tune().record.regression
    earlier = find_earlier_studies(team.folder / "zerotune-studies", "team", team.arguments())
    assert [study.regressed for study in earlier] == [False, False, True]
    assert not team.tune().record.regression


def test_sizes_alone_are_nothing_to_learn_from(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="--from-earlier is for methods that confirm a winner"):
        StudyArguments(config_path=tmp_path, model_dir=tmp_path, method="micro_batch", from_earlier=True)
