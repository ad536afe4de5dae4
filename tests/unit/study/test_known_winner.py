"""A study that learns: what it confirms, when it ends early, and what its search starts from."""

import copy
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_studies import BASE, CutShortError, Experiment, larger_is_faster

from zerotune.trial_lib.messages.statistics import largest_fall
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.arguments import StudyTime
from zerotune.trial_lib.study.confirm import answer_of, since_last_study, starting_from
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.earlier import with_data


@pytest.fixture
def team(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path)


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Experiment, Path]:
    """An experiment that was tuned once, and a copy of its folder: 4 samples at a time are fastest."""
    team = Experiment(tmp_path_factory.mktemp("team"))
    study = team.tune()
    assert study.record.finding.endswith(": ZeRO 0, micro-batch 4, accumulation 2")
    return team, Path(shutil.copytree(team.folder, tmp_path_factory.mktemp("kept") / "team"))


@pytest.fixture
def tuned(tuned_once: tuple[Experiment, Path]) -> Experiment:
    """That experiment, as it was then. Its records have the paths of its folder."""
    team, kept = tuned_once
    shutil.rmtree(team.folder)
    shutil.copytree(kept, team.folder)
    return copy.deepcopy(team)


def first_candidate(driver: StudyDriver) -> Candidate | None:
    """Returns the earlier winner that the search of a study starts from."""
    assert driver.search is not None
    return driver.advice.head_start.winner(driver.search.problem)


def slower(candidate: Candidate) -> float:
    return 0.6 * larger_is_faster(candidate)


def test_the_first_study_says_that_there_is_nothing_to_learn_from_and_searches(team: Experiment) -> None:
    with team.opened() as study:
        team.finish(study)
        assert starting_from(study.driver) == "No earlier study of this experiment can be learned from."
        assert since_last_study(study.driver) is None
    assert Purpose.SEARCH in team.purposes
    assert not study.record.regression
    assert study.paths.record.stat().st_mode & 0o777 == 0o600


def test_where_nothing_has_changed_the_known_winner_is_confirmed_and_there_is_no_search(tuned: Experiment) -> None:
    study = tuned.tune()
    assert tuned.purposes[0] is Purpose.PROFILE
    assert set(tuned.purposes[1:]) == {Purpose.CONFIRM}
    assert {candidate.micro_batch_size for _, _, candidate in tuned.ran[1:]} == {2, 4}
    assert len(tuned.ran) == 7
    assert study.record.finding.endswith(": ZeRO 0, micro-batch 4, accumulation 2")
    assert not study.record.regression


def test_a_known_winner_is_confirmed_in_turns_with_the_user_s_own(tuned: Experiment) -> None:
    tuned.tune()
    sizes = [candidate.micro_batch_size for _, _, candidate in tuned.ran[1:]]
    assert all({first, second} == {2, 4} for first, second in zip(sizes[::2], sizes[1::2], strict=True))
    assert sizes[0] != sizes[2]


def test_a_study_that_ended_early_is_learned_from_like_any_other(tuned: Experiment) -> None:
    for _ in range(3):
        tuned.tune()
        assert Purpose.SEARCH not in tuned.purposes
    shutil.rmtree(min((tuned.folder / "zerotune-studies").iterdir(), key=lambda folder: folder.stat().st_mtime))
    tuned.tune()
    assert Purpose.SEARCH not in tuned.purposes


def test_other_versions_search_again_from_the_known_winner_on(tuned: Experiment) -> None:
    tuned.versions = {**tuned.versions, "torch": "2.7.0"}
    with tuned.opened() as study:
        tuned.finish(study)
        assert starting_from(study.driver).endswith("Changed since: torch 2.6.0 -> 2.7.0.")
        assert study.driver.advice.head_start.trials() == []
    assert tuned.purposes[:3] == [Purpose.PROFILE, Purpose.SUBMITTED, Purpose.SEARCH]
    assert (tuned.searched[0].zero_stage, tuned.searched[0].micro_batch_size) == (0, 4)


def test_edited_code_searches_again_and_knows_what_fits(tuned: Experiment) -> None:
    (tuned.model / "train.py").write_text("print('trains otherwise')\n")
    with tuned.opened() as study:
        tuned.finish(study)
        assert starting_from(study.driver).endswith("Changed since: train.py (edited).")
        told = study.driver.advice.head_start.trials()
        assert told
        assert all(result.metrics == {} and result.memory.peak for _, result in told)
    assert (tuned.searched[0].zero_stage, tuned.searched[0].micro_batch_size) == (0, 4)


def test_code_that_needs_other_memory_is_told_nothing_of_it(tuned: Experiment) -> None:
    (tuned.model / "train.py").write_text("print('trains otherwise')\n")
    tuned.profile = replace(tuned.profile, activation_mem_per_gpu=200_000)
    with tuned.opened() as study:
        tuned.finish(study)
        assert study.driver.advice.head_start.trials() == []


def test_a_larger_budget_goes_on_where_the_earlier_search_ended(tuned: Experiment) -> None:
    before = {(candidate.family, candidate.micro_batch_size) for candidate in tuned.searched}
    with tuned.opened(max_trials=20) as study:
        tuned.finish(study)
        told = study.driver.advice.head_start.trials()
        assert starting_from(study.driver).endswith("Changed since: max_trials 8 -> 20.")
    assert before <= {(candidate.family, candidate.micro_batch_size) for candidate, _ in told}
    assert any(result.metrics for _, result in told)
    again = {(candidate.family, candidate.micro_batch_size) for candidate in tuned.searched[1:]}
    assert not again & before


def test_what_the_host_had_left_for_a_trial_is_another_days(tuned: Experiment) -> None:
    with tuned.opened(max_trials=20) as study:
        tuned.finish(study)
        start = study.driver.advice.head_start
    told = start.trials()
    lacked = {"outcome": Outcome.OUT_OF_HOST_MEMORY, "metrics": {}}
    (study_before,) = start.earlier
    trials = study_before.trials
    full = trials[0].model_copy(update={"result": replace(trials[0].result, **lacked)})
    changed = study_before.model_copy(update={"trials": (full, *trials[1:])})
    assert replace(start, earlier=(changed,)).trials() == told[1:]


@pytest.mark.parametrize("method", ["asha", "binary", "random", "adaptive"])
def test_every_method_begins_with_the_known_winner(tuned: Experiment, method: str) -> None:
    tuned.versions = {**tuned.versions, "deepspeed": "0.20.0"}
    # Stage 0, which won, is not among the stages that dsat's methods draw from.
    tuned.tune(method=method, zero_stages=(0, 1, 2, 3))
    assert (tuned.searched[0].zero_stage, tuned.searched[0].micro_batch_size) == (0, 4)


def test_the_known_winner_is_given_the_batch_that_is_kept_now(tuned: Experiment) -> None:
    tuned.write({**BASE, "gradient_accumulation_steps": 8})
    tuned.tune()
    assert tuned.searched[0].gradient_accumulation_steps == 4
    tuned.write({**BASE, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3})
    with tuned.opened() as study:
        tuned.finish(study)
        assert first_candidate(study.driver) is None


def test_a_slower_winner_is_said_with_both_numbers_and_what_changed(tuned: Experiment) -> None:
    tuned.versions = {**tuned.versions, "torch": "2.7.0"}
    tuned.speed = slower
    with tuned.opened() as study:
        tuned.finish(study)
        compared = since_last_study(study.driver)
    assert compared is not None
    assert compared.is_regression
    assert compared.throughput == pytest.approx(240, rel=0.05)
    assert compared.last_throughput == pytest.approx(400, rel=0.05)
    assert compared.ratio.high < 1.0
    assert compared.changes == ("torch 2.6.0 -> 2.7.0",)
    assert study.record.regression == compared.sentence
    assert compared.sentence.endswith("compared by throughput. Changed between them: torch 2.6.0 -> 2.7.0.")


def test_a_winner_that_is_slower_although_nothing_is_known_to_have_changed_is_searched_again(
    tuned: Experiment,
) -> None:
    tuned.speed = slower
    study = tuned.tune()
    kinds = list(dict.fromkeys(tuned.purposes))
    assert kinds == [Purpose.PROFILE, Purpose.CONFIRM, Purpose.SUBMITTED, Purpose.SEARCH]
    assert tuned.purposes[-1] is Purpose.CONFIRM
    # It has just been measured: the search is told that, and it is not run once more.
    assert (0, 4) not in [(candidate.zero_stage, candidate.micro_batch_size) for candidate in tuned.searched]
    assert "ZeroTune knows of no change between them." in study.record.regression


def test_a_winner_that_is_no_longer_faster_than_the_user_s_own_is_searched_again(tuned: Experiment) -> None:
    tuned.speed = lambda candidate: 500.0 if candidate.micro_batch_size == 2 else larger_is_faster(candidate)
    tuned.tune()
    assert Purpose.SEARCH in tuned.purposes


def test_the_study_after_a_regression_compares_with_what_it_found(tuned: Experiment) -> None:
    tuned.speed = slower
    assert tuned.tune().record.regression
    study = tuned.tune()
    assert not study.record.regression
    assert Purpose.SEARCH not in tuned.purposes


def measured_by_an_older_version(studies: Path) -> None:
    """Takes from the records of all studies what an older version did not write."""
    for fingerprint in studies.glob("*/fingerprint.json"):
        record = json.loads(fingerprint.read_text())
        assert record.pop("measuring")
        fingerprint.write_text(json.dumps(record))


def test_figures_that_came_about_in_another_way_are_not_compared(tuned: Experiment) -> None:
    """The first night after an upgrade is no regression, and history begins anew with it."""
    tuned.tune()
    measured_by_an_older_version(tuned.folder / "zerotune-studies")
    tuned.speed = slower
    with tuned.opened() as study:
        tuned.finish(study)
        compared = since_last_study(study.driver)
        # Speeds of that way are nothing for the search either. What fits is.
        assert not any(result.metrics for _, result in study.driver.advice.head_start.trials())
    assert Purpose.SEARCH in tuned.purposes
    assert compared is not None
    assert not study.record.regression
    assert "in another way, so they are not compared, and the history begins anew" in compared.sentence
    assert "ZeroTune's way to measure not set -> 2" in compared.sentence
    # The level of the older version, which was higher, is no level of the next nights.
    with tuned.opened() as study:
        tuned.finish(study)
        compared = since_last_study(study.driver)
    assert compared is not None
    assert compared.ratio is not None
    assert compared.held_by == 1
    assert not study.record.regression
    tuned.speed = lambda candidate: 0.6 * slower(candidate)
    assert tuned.tune().record.regression


def test_the_first_samples_are_not_compared_with_others(tuned: Experiment) -> None:
    """A new version of a framework may make a loader that cannot be moved. Then each round has the first batches."""
    tuned.moves = False
    tuned.speed = slower
    with tuned.opened() as study:
        tuned.finish(study)
        compared = since_last_study(study.driver)
    assert compared is not None
    assert not study.record.regression
    assert "the history begins anew" in compared.sentence
    tuned.moves = True
    study = tuned.tune()
    assert study.record.regression
    assert "below the last known 39" in study.record.regression


def test_where_the_user_s_own_had_won_it_is_confirmed_against_the_best_of_the_others(team: Experiment) -> None:
    team.speed = lambda candidate: 50.0 if candidate.zero_stage is not None else 100.0
    assert team.tune().record.finding == "No configuration was faster than yours."
    study = team.tune()
    assert Purpose.SEARCH not in team.purposes
    assert study.record.finding == "No configuration was faster than yours."
    team.versions = {**team.versions, "torch": "2.7.0"}
    with team.opened() as study:
        team.finish(study)
        assert first_candidate(study.driver) is None


def test_a_winner_with_settings_that_the_search_may_no_longer_choose_is_left_out(team: Experiment) -> None:
    team.write(BASE, search_space={"zero_optimization.reduce_bucket_size": [1_000_000, 2_000_000]})
    # The winner needs its bucket.
    team.speed = lambda candidate: larger_is_faster(candidate) * (1 if "bucket" in str(candidate.knobs) else 0.5)
    team.tune()
    team.write(BASE)
    with team.opened() as study:
        team.finish(study)
        known = study.driver.advice.head_start.earlier[-1].other.candidate
        assert first_candidate(study.driver) is None
    assert "reduce_bucket_size" in str(known.knobs)
    assert known.knobs not in [candidate.knobs for candidate in team.searched]


def test_a_regression_is_kept_where_no_time_is_left_to_search(
    tuned: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.speed = slower
    monkeypatch.setattr(StudyTime, "is_over_for_search", True)
    with tuned.opened() as study:
        tuned.finish(study)
        answer = answer_of(study.driver)
    assert Purpose.SEARCH not in tuned.purposes
    assert answer is not None
    assert answer.finding is not None
    assert "ZeroTune knows of no change between them." in study.record.regression


def test_a_study_that_is_not_to_learn_takes_no_notice(tuned: Experiment) -> None:
    study = tuned.tune(from_earlier=False)
    assert Purpose.SEARCH in tuned.purposes
    assert not study.paths.earlier_studies.exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """An experiment whose second study, after a regression, nobody has cut short."""
    team = Experiment(tmp_path_factory.mktemp("undisturbed"))
    team.tune()
    team.speed = slower
    team.tune()
    return team


SOON = (2, 9, 11)


@pytest.mark.parametrize("ended", [*SOON, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 5, 8, 10, 14))])
def test_a_study_that_is_cut_short_is_resumed_as_if_it_had_not_been(
    tuned: Experiment, ended: int, undisturbed: Experiment
) -> None:
    tuned.speed = slower
    with tuned.opened() as study:
        root = study.paths.root
        with pytest.raises(CutShortError):
            tuned.finish(study, trials=ended)
        begun = list(tuned.ran)
    # What it learns from stands in its own folder.
    for other in root.parent.iterdir():
        if other != root:
            shutil.rmtree(other)
    with tuned.resumed(root) as study:
        tuned.finish(study)
        answer = answer_of(study.driver)
    whole = [*begun, *tuned.ran]
    assert [(purpose, candidate) for _, purpose, candidate in whole] == [
        (purpose, candidate) for _, purpose, candidate in undisturbed.ran
    ]
    numbers = [number for number, _, _ in whole]
    assert len(numbers) == len(set(numbers))
    kinds = list(dict.fromkeys(purpose for _, purpose, _ in whole))
    assert kinds == [Purpose.PROFILE, Purpose.CONFIRM, Purpose.SUBMITTED, Purpose.SEARCH]
    assert answer is not None
    assert study.record.regression


def test_rounds_of_other_data_are_no_regression() -> None:
    """Four rounds of one night, and five others of the next, on a GPU whose machine differs by nothing."""
    draws, alarms = random.Random(3), 0
    for _ in range(200):
        nights = [[math.exp(draws.gauss(0.0, 0.1)) for _ in range(rounds)] for rounds in (4, 5)]
        fall = largest_fall(nights, with_data(0.01, nights)).ratio
        alarms += fall.high < 1.0 and fall.value < 0.98
    assert alarms <= 4
