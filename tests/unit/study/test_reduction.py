"""What is left of a winner whose changes are dropped one after another, by studies whose trials are simulated."""

import math
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_studies import BASE, CutShortError, Experiment

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.statistics import ratios_to
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.knobs import get_knob
from zerotune.trial_lib.study.arguments import StudyTime
from zerotune.trial_lib.study.confirm import Answer, answer_of, confirmation_of
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.finding import Estimate, Finding, Worth
from zerotune.trial_lib.study.open_study import OpenStudy
from zerotune.trial_lib.study.reduction import chained

ZERO = "zero_optimization"
BUCKET, CONTIGUOUS = f"{ZERO}.reduce_bucket_size", f"{ZERO}.contiguous_gradients"


def speed_of(stage: float = 1.0, bucket: float = 1.0, size: float = 1.0, together: float = 1.0) -> Any:
    """Samples/s of a candidate whose stage 0, bucket of 500 and micro-batch of 4 are worth so much."""

    def speed(candidate: Candidate) -> float:
        knobs = candidate.knobs
        at_0 = get_knob(knobs, f"{ZERO}.stage", 1) == 0
        small = get_knob(knobs, BUCKET) is not None
        large = candidate.micro_batch_size == 4
        found = 100.0 * (stage if at_0 else 1.0) * (bucket if small else 1.0) * (size if large else 1.0)
        return found * (together if at_0 and large else 1.0)

    return speed


@pytest.fixture
def team(tmp_path: Path) -> Experiment:
    team = Experiment(tmp_path)
    team.scatter = 0.004
    return team


def tuned(team: Experiment, speed: Any, **changed: Any) -> Finding:
    team.speed = speed
    with team.opened(**{"from_earlier": False, **changed}) as study:
        team.finish(study)
        answer = answer_of(study.driver)
    return finding_of(answer)


def finding_of(answer: Answer | None) -> Finding:
    assert answer is not None
    assert answer.finding is not None
    return answer.finding


def by_knob(finding: Finding, verdict: str) -> dict[str, Worth]:
    return {worth.name: worth for worth in finding.worths if worth.verdict == verdict}


def winners(team: Experiment, finding: Finding) -> Candidate:
    assert finding.winner is not None
    return next(candidate for number, _, candidate in team.ran if number == finding.winner.number)


def test_a_winner_of_several_changes_of_which_one_matters_is_reduced_to_that_one(team: Experiment) -> None:
    finding = tuned(team, speed_of(size=2.0))
    winner = winners(team, finding)
    assert winner.micro_batch_size == 4
    assert winner.knobs == {ZERO: {"stage": 1}}
    assert set(by_knob(finding, "kept")) == {"micro-batch"}
    assert len(by_knob(finding, "dropped")) == 1
    dropped = next(iter(by_knob(finding, "dropped").values()))
    assert {"stage"} <= set(dropped.knobs) or "contiguous_gradients" in dropped.knobs
    assert dropped.without is not None
    assert dropped.without.low < 1.0 < dropped.without.high
    assert finding.winner is not None
    assert finding.winner.gain is not None
    assert finding.winner.gain.low < 2.0 < finding.winner.gain.high
    # The only change that is left is worth the whole gain.
    worth = by_knob(finding, "kept")["micro-batch"].times
    assert worth is not None
    assert worth.value == pytest.approx(finding.winner.gain.value)


def test_each_change_that_matters_stays_and_its_worth_is_measured(team: Experiment) -> None:
    finding = tuned(team, speed_of(stage=1.3, size=2.0))
    kept = by_knob(finding, "kept")
    assert {"micro-batch", "stage"} <= set(kept)
    for name, true in (("micro-batch", 2.0), ("stage", 1.3)):
        worth = kept[name].times
        assert worth is not None
        assert worth.low < true < worth.high
    assert by_knob(finding, "kept")["micro-batch"].of_search
    assert any(line.startswith("Of its changes, micro-batch is worth at least 1.") for line in finding.lines)


def test_a_change_that_the_search_has_seen_to_matter_stays_without_a_round(team: Experiment) -> None:
    finding = tuned(team, speed_of(size=2.0))
    confirming = [candidate for _, purpose, candidate in team.ran if purpose is Purpose.CONFIRM]
    weighed = confirming[2 * finding.rounds :]
    assert len(weighed) == finding.weighed_in > 0
    assert {candidate.micro_batch_size for candidate in weighed} == {4}


def test_where_rounds_would_hardly_tell_they_end_soon_and_the_answer_says_so(team: Experiment) -> None:
    team.scatter = 0.25
    finding = tuned(team, speed_of(size=20.0))
    assert finding.winner is not None
    assert finding.winner.verdict == "faster"
    assert finding.weighed_in <= 4
    assert not by_knob(finding, "dropped")
    assert "its reading varies by" in finding.unweighed


def test_a_change_worth_less_than_the_margin_is_dropped(team: Experiment) -> None:
    finding = tuned(team, speed_of(stage=1.004, size=2.0))
    assert winners(team, finding).knobs == {ZERO: {"stage": 1}}


def test_changes_that_matter_together_alone_both_stay(team: Experiment) -> None:
    # Neither is worth a thing without the other.
    finding = tuned(team, speed_of(together=1.5))
    assert {"micro-batch", "stage"} <= set(by_knob(finding, "kept"))
    winner = winners(team, finding)
    assert (winner.zero_stage, winner.micro_batch_size) == (0, 4)


def test_a_winner_of_one_change_needs_no_further_trial(team: Experiment) -> None:
    team.write({**BASE, ZERO: {"stage": 0}})
    finding = tuned(team, speed_of(size=2.0), zero_stages=(0,))
    confirming = [number for number, purpose, _ in team.ran if purpose is Purpose.CONFIRM]
    assert len(confirming) == 2 * finding.rounds
    assert set(by_knob(finding, "kept")) == {"micro-batch"}
    assert not finding.unweighed


def test_where_nothing_is_faster_nothing_is_weighed(team: Experiment) -> None:
    finding = tuned(team, lambda candidate: 100.0)
    assert finding.winner is not None
    assert finding.winner.verdict == "own"
    assert finding.worths == ()


def test_without_time_for_the_least_rounds_nothing_is_dropped_and_the_answer_says_so(
    team: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerotune.trial_lib.study.reduction._LEAST_ROUNDS", 100)
    finding = tuned(team, speed_of(size=2.0))
    confirming = [number for number, purpose, _ in team.ran if purpose is Purpose.CONFIRM]
    assert len(confirming) == 2 * finding.rounds
    assert by_knob(finding, "untried")
    assert not by_knob(finding, "dropped")
    assert any(line.startswith("Not tried without") and "were left" in line for line in finding.lines)


def test_a_change_that_memory_needs_stays_and_the_reason_is_told(team: Experiment) -> None:
    # Without stage 2 the micro-batch of 4 does not fit.
    ended = team._ended

    def end(plan: TrialPlan, driver: StudyDriver) -> TrialResult:
        result = ended(plan, driver)
        if plan.candidate.zero_stage == 2 or plan.candidate.micro_batch_size < 4:
            return result
        return replace(result, outcome=Outcome.OUT_OF_MEMORY, metrics={}, reason="No room.")

    team._ended = end  # type: ignore[method-assign]
    finding = tuned(team, speed_of(size=2.0), zero_stages=(1, 2))
    winner = winners(team, finding)
    assert (winner.zero_stage, winner.micro_batch_size) == (2, 4)
    assert by_knob(finding, "kept")["stage"].reason == "No room."
    assert "Of its changes, stage is kept: No room." in finding.lines


def test_a_reduced_winner_that_trains_otherwise_is_none(team: Experiment) -> None:
    ended = team._ended

    def end(plan: TrialPlan, driver: StudyDriver) -> TrialResult:
        result, knobs = ended(plan, driver), str(plan.candidate.knobs)
        is_whole = "contiguous" in knobs and "bucket" in knobs
        is_reduced = plan.purpose is Purpose.CONFIRM and plan.candidate.micro_batch_size == 4 and not is_whole
        return replace(result, losses=[3.0, 2.0, 1.0]) if is_reduced else result

    team._ended = end  # type: ignore[method-assign]
    finding = tuned(team, speed_of(size=2.0), zero_stages=(1,))
    assert "contiguous_gradients" in str(winners(team, finding).knobs)
    assert not by_knob(finding, "dropped")
    assert any(worth.reason for worth in finding.worths)


@pytest.mark.parametrize("minutes_over", [False, True])
def test_what_is_cut_short_keeps_what_was_measured_until_then(
    team: Experiment, monkeypatch: pytest.MonkeyPatch, minutes_over: bool
) -> None:
    team.speed = speed_of(size=2.0)
    with team.opened(from_earlier=False) as study:
        run_until_weighed(team, study, trials=1)
        if minutes_over:
            monkeypatch.setattr(StudyTime, "is_over", True)
        finding = finding_of(answer_of(study.driver))
    assert finding.winner is not None
    assert finding.winner.verdict == "faster"
    assert not by_knob(finding, "dropped")
    why = "the minutes of --max-minutes were over" if minutes_over else "the study was interrupted"
    assert finding.unweighed == why


@pytest.mark.parametrize("weighed", [1, 2, 3])
def test_a_study_that_is_resumed_in_the_middle_of_it_comes_to_the_same_end(tmp_path: Path, weighed: int) -> None:
    ends = []
    for is_cut in (False, True):
        folder = tmp_path / str(is_cut)
        folder.mkdir()
        team = Experiment(folder)
        team.scatter, team.speed = 0.0, speed_of(stage=1.03, size=2.0)
        with team.opened(from_earlier=False) as study:
            if is_cut:
                run_until_weighed(team, study, weighed)
            else:
                team.finish(study)
        ran = [number for number, _, _ in team.ran]
        with team.resumed(study.paths.root) if is_cut else nullcontext(study) as study:
            if is_cut:
                team.finish(study)
                ran += [number for number, _, _ in team.ran]
            finding = finding_of(answer_of(study.driver))
        ends.append((set(ran), finding.model_dump()))
    assert ends[0] == ends[1]


def run_until_weighed(team: Experiment, study: OpenStudy, trials: int) -> None:
    """Runs a study until so many trials have weighed its winner's changes."""
    ended, left = team._ended, [trials]

    def end(plan: TrialPlan, driver: StudyDriver) -> TrialResult:
        confirmation = confirmation_of(driver)
        if confirmation is not None and confirmation.next is None:
            left[0] -= 1
            if left[0] < 0:
                raise CutShortError
        return ended(plan, driver)

    team._ended = end  # type: ignore[method-assign]
    with pytest.raises(CutShortError):
        team.finish(study)
    team._ended = ended  # type: ignore[method-assign]


def test_the_gain_of_what_is_left_is_as_uncertain_as_both_comparisons_are() -> None:
    rng, held, repeats = random.Random(5), 0, 400
    for _ in range(repeats):
        first, second = ([{"a": draw(rng, 2.0), "b": draw(rng, 1.0)} for _ in range(4)] for _ in range(2))
        whole, reduced = (
            ratios_to("b", first, 0.05)["a"],
            ratios_to("a", [{**row, "c": draw(rng, 2.0)} for row in second], 0.05)["c"],
        )
        estimate = chained(Estimate(value=whole.value, low=whole.low, high=whole.high), reduced)
        held += estimate.low <= 2.0 <= estimate.high
    assert held >= 0.95 * repeats - 10


def draw(rng: random.Random, level: float) -> float:
    return level * math.exp(rng.gauss(0.0, 0.02))
