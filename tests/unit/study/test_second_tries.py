"""A failure that may be chance is tried once more before it rules anything out."""

from pathlib import Path

import pytest
from simulated_studies import CutShortError, Experiment

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.runner import SecondTries

EIO = "The program raised OSError: [Errno 5] Input/output error"


class Disk:
    """Fails the first reads of some candidates."""

    def __init__(self, stage: int | None, failures: int) -> None:
        self._stage, self._left = stage, failures

    def __call__(self, candidate: Candidate) -> str:
        if not self._left or self._stage not in (None, candidate.zero_stage):
            return ""
        self._left -= 1
        return EIO


@pytest.fixture
def team(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path)


def test_every_method_tries_again_within_its_budget(team: Experiment) -> None:
    team.crash = Disk(stage=None, failures=1)
    team.largest = 10**9
    team.tune(method="random", max_trials=6)
    assert team.searched[0] == team.searched[1]
    assert len(team.searched) <= 5


def test_two_errors_of_a_disk_leave_no_stage_out(team: Experiment) -> None:
    # Stage 3 is the best by far.
    team.speed = lambda candidate: (1 + (candidate.zero_stage == 3)) * 100.0 * candidate.micro_batch_size
    team.crash = Disk(stage=3, failures=2)
    team.largest = 10**9
    study = team.tune(max_trials=30)
    results = study.driver.state.of_purpose(Purpose.SEARCH)
    assert sum(result.outcome is Outcome.CRASHED for result in results) == 2
    assert len(results) <= 29
    assert study.driver.search is not None
    assert study.driver.search.left_out == ()
    assert "ZeRO 3" in study.record.finding


def test_a_failure_that_a_second_try_repeats_is_one_of_the_settings(team: Experiment) -> None:
    team.crash = lambda candidate: "The program raised KeyError: 'exp_avg'" if candidate.zero_stage == 3 else ""
    study = team.tune(max_trials=12)
    failed = [candidate for candidate in team.searched if candidate.zero_stage == 3]
    # The first one twice. What fails alike after that is not tried again.
    assert failed[:2] == [failed[0]] * 2
    assert len(failed) == len({str(candidate) for candidate in failed}) + 1
    assert len(team.searched) <= 11
    assert study.driver.search is not None
    (left_out,) = study.driver.search.left_out
    assert "ZeRO stage 3" in left_out


@pytest.mark.parametrize("cut", [4, 7, *(pytest.param(each, marks=pytest.mark.long) for each in (3, 5, 6, 8))])
def test_a_resumed_study_tries_the_same_again(team: Experiment, cut: int) -> None:
    team.crash = Disk(stage=2, failures=1)
    whole = team.tune(max_trials=8, from_earlier=False)
    expected = [(asked, whole.driver.state.candidates[asked]) for asked in sorted(whole.driver.state.purposes)]
    team.crash = Disk(stage=2, failures=1)
    with team.opened(max_trials=8, from_earlier=False) as study, pytest.raises(CutShortError):
        team.finish(study, trials=cut)
    with team.resumed(study.paths.root) as resumed:
        team.finish(resumed)
        again = resumed.driver.state
    found = [(asked, again.candidates[asked]) for asked in sorted(again.purposes)]
    searched = [pair for pair in found if again.purposes[pair[0]] is Purpose.SEARCH]
    assert searched == [pair for pair in expected if whole.driver.state.purposes[pair[0]] is Purpose.SEARCH]


def ended(outcome: Outcome, reason: str = EIO, **fields: bool) -> TrialResult:
    return TrialResult(
        trial_id="s", number=2, purpose=Purpose.SEARCH, config_hash="0", outcome=outcome, reason=reason, **fields
    )


ONE, OTHER = Candidate(micro_batch_size=4), Candidate(micro_batch_size=8)


@pytest.mark.parametrize(
    "result",
    [
        ended(Outcome.COMPLETED),
        ended(Outcome.OUT_OF_MEMORY),
        ended(Outcome.OUT_OF_DATA),
        ended(Outcome.INVALID),
        ended(Outcome.CRASHED, from_outside=True),
    ],
    ids=lambda result: result.outcome.value,
)
def test_what_follows_from_the_candidate_is_not_tried_again(result: TrialResult) -> None:
    assert not SecondTries().takes(ONE, result, lambda: True)


def test_a_budget_that_is_spent_allows_no_second_try() -> None:
    assert not SecondTries().takes(ONE, ended(Outcome.CRASHED), lambda: False)


def test_another_failure_the_second_time_does_not_blame_the_settings_of_others() -> None:
    tries = SecondTries()
    assert tries.takes(ONE, ended(Outcome.CRASHED), lambda: True)
    assert tries.begins(ONE)
    assert not tries.begins(OTHER)
    assert not tries.takes(ONE, ended(Outcome.CRASHED, "It broke."), lambda: True)
    assert tries.takes(OTHER, ended(Outcome.CRASHED), lambda: True)
