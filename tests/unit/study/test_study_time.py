"""What a study does with the time that it may take."""

import itertools
import time

import pytest

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyTime
from zerotune.trial_lib.study.confirmation import Confirmation, Contender


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_last_third_is_left_to_the_confirmation(clock: list[float]) -> None:
    study, unconfirmed = StudyTime(3.0, 30.0), StudyTime(3.0, 30.0, confirms=False)
    seen = []
    for seconds in (0.0, 89.0, 91.0, 149.0, 151.0):
        clock[0] = 1000.0 + seconds
        seen.append((study.is_over_for_search, unconfirmed.is_over_for_search, study.is_over))
    assert seen == [(False,) * 3, (False,) * 3, (True, False, False), (True, False, False), (True,) * 3]


def test_without_a_limit_it_is_never_over(clock: list[float]) -> None:
    study = StudyTime(None, 1e9)
    clock[0] = 1e12
    assert not study.is_over
    assert not study.is_over_for_search


def contender(key: str, speed: float) -> Contender:
    candidate = Candidate(knobs={"zero_optimization": {"stage": len(key)}}, micro_batch_size=4, slots=1)
    return Contender(candidate, candidate.complete({}), reading(key, speed, Purpose.SEARCH))


def reading(key: str, speed: float, purpose: Purpose = Purpose.CONFIRM, losses: float = 3.0) -> TrialResult:
    metrics = {"throughput": speed}
    given = {"losses": [losses, losses - 0.1, losses - 0.2], "phases": {"steps": 1.0}, "metrics": metrics}
    return TrialResult(trial_id="s", number=2, purpose=purpose, config_hash=key, outcome=Outcome.COMPLETED, **given)


def begun(trials: int, losses: float = 3.0) -> Confirmation:
    """Returns a confirmation that has measured so many times. One that is slow at first would shift the pairs."""
    own, other = contender("a", 100.0), contender("bb", 200.0)
    confirmation = Confirmation(own, [other], "throughput", 600.0)
    speeds = {"a": itertools.cycle([100.0, 101.0, 1.0]), "bb": itertools.cycle([200.0, 202.0, 2.0])}
    for _ in range(trials):
        key = "a" if confirmation.next is own.candidate else "bb"
        confirmation.tell(reading(key, next(speeds[key]), losses=3.0 if key == "a" else losses))
    confirmation.end_now()
    return confirmation


@pytest.mark.parametrize("trials", [4, 5])
def test_a_confirmation_that_is_cut_short_has_the_interval_of_its_whole_rounds(trials: int) -> None:
    confirmation = begun(trials)
    finding = confirmation.finding()
    assert confirmation.next is None
    assert finding.rounds == 2
    assert finding.winner is not None
    assert finding.winner.gain is not None
    assert finding.winner.gain.value == pytest.approx(2.0, rel=0.01)


def test_one_that_is_cut_short_chooses_none_that_trains_otherwise() -> None:
    assert [each.verdict for each in begun(4, losses=9.0).finding().candidates] == ["disagrees"]


def test_one_round_confirms_nothing() -> None:
    assert begun(3).next is not None
