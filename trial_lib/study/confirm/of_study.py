"""The last step of a study: the trial that confirms next, and the answer."""

from dataclasses import dataclass
from typing import Any

from trial_lib.launch.trial import TrialPlan
from trial_lib.records.answer_line import NONE_FASTER_ONCE, gain_line, name_of
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.failure_cause import as_sentence
from trial_lib.records.result import TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.step_account import StepAccount
from trial_lib.records.study_folder import StudyStatus
from trial_lib.search.methods import METHODS
from trial_lib.space.knobs import STAGE, get_knob
from trial_lib.study.answer import best_result, gain
from trial_lib.study.confirm.confirmation import Confirmation
from trial_lib.study.confirm.contender import Contender, is_good, ranking
from trial_lib.study.confirm.finding import Estimate, Finding, freeing_advice, partition_advice
from trial_lib.study.confirm.others import Others, others_of
from trial_lib.study.confirm.why import step_accounts, traced_once
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier.known_winner import (
    confirmed_after_search,
    ended_on_known_winner,
    known_confirmation,
)
from trial_lib.study.earlier.since_last import SinceLast, since_last
from trial_lib.study.runner import seconds_of
from trial_lib.study.study_metric import INSTEAD
from trial_lib.study.study_time import MINUTES_OVER


@dataclass(frozen=True)
class NoAnswer:
    """Why a study that has searched has no answer.

    Attributes:
        headline: that there is none, in one sentence.
        reason: why, with the remedy.
    """

    headline: str
    reason: str

    @property
    def sentence(self) -> str:
        """Both."""
        return f"{self.headline} {self.reason}".rstrip()


@dataclass(frozen=True)
class Answer:
    """The answer of a study.

    Attributes:
        best: the winner's trial. If it was confirmed, the median one of its confirming trials, with their medians.
        finding: the result of the confirmation. None if there was none.
        gain: the winner's gain over the user's configuration. None if there is nothing to compare.
        name: the winner's name in a sentence.
        why: where the time of a step goes: of the winner, of the user's configuration, and of arms.
    """

    best: TrialResult
    finding: Finding | None
    gain: float | None
    name: str
    why: tuple[StepAccount, ...] = ()

    @property
    def sentence(self) -> str:
        """The answer in one line. Empty if nothing was confirmed and there is nothing to compare."""
        if self.finding is not None:
            return self.finding.sentence
        if self.best.purpose is Purpose.SUBMITTED:
            return NONE_FASTER_ONCE
        return "" if self.gain is None else gain_line(self.gain, self.name)

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """The ends of the gain's interval. None if the gain is from one measurement each, or there is none."""
        if self.finding is None or self.finding.winner is None or self.finding.winner.gain is None:
            return None
        return self.finding.winner.gain.low, self.finding.winner.gain.high

    def document(self, driver: StudyDriver) -> dict[str, Any]:
        """Returns the measurements, as JSON."""
        submitted = driver.state.submitted
        own = {} if submitted is None else submitted.metrics
        if self.finding is not None and self.finding.own is not None:
            own = self.finding.own.metrics
        return {
            "metric": driver.metric,
            "trial": self.best.number,
            "gain": self.gain,
            "gain_interval": self.gain_interval,
            "metrics": self.best.metrics,
            "submitted": own,
            "confirmation": None if self.finding is None else self.finding.document(),
            "why": [account.document() for account in self.why],
        }


def confirmation_of(driver: StudyDriver) -> Confirmation | None:
    """Returns the confirmation of a study, as far as it has come; None before its search has ended.

    It is also None for a search for micro-batch sizes, which has no winner to confirm.
    """
    if (
        not METHODS[driver.setup.arguments.method].confirms_winner
        or not driver.state.has_searched
        or driver.state.profile is None
    ):
        return None
    if ended_on_known_winner(driver):
        return known_confirmation(driver)
    metric, submitted = driver.metric, driver.state.submitted
    searched = driver.state.of_purpose(Purpose.SEARCH)
    own, candidate = None, None if submitted is None else driver.state.candidates[submitted.number]
    if submitted is not None and is_good(submitted, metric):
        own = _contender(driver, submitted)
    expected = {} if driver.search is None else driver.search.expected()
    readings = [_contender(driver, result, expected.get(result.number)) for result in searched]
    ranked = ranking(readings, own, metric)
    if not ranked:
        return None
    before = [driver.state.profile, *([submitted] if submitted is not None else []), *searched]
    confirmation = Confirmation(
        own,
        ranked,
        metric,
        driver.setup.device,
        seconds_of(before),
        candidate,
        driver.state.profile.formats,
        driver.setup.free_switches,
    )
    for result in confirmed_after_search(driver):
        confirmation.tell(result)
    return confirmation


def _contender(driver: StudyDriver, reading: TrialResult, expected: float | None = None) -> Contender:
    candidate = driver.state.candidates[reading.number]
    return Contender(candidate, candidate.complete(driver.known.base_config), reading, expected)


def next_confirming_plan(driver: StudyDriver) -> TrialPlan | None:
    """Returns the next confirming trial, in fresh processes and alone; None when the confirmation is over."""
    confirmation = confirmation_of(driver)
    candidate = None if confirmation is None else confirmation.next
    return None if candidate is None else traced_once(driver, driver.plan_again(Purpose.CONFIRM, candidate))


def search_found(driver: StudyDriver) -> str:
    """Returns which configuration the search expects most of; empty if none is confirmed, or one has been already."""
    confirmation = confirmation_of(driver)
    leader = None if confirmation is None or driver.state.of_purpose(Purpose.CONFIRM) else confirmation.leader
    if leader is None:
        return ""
    reading, metric = leader.reading, SEARCH_METRICS[driver.metric]
    beside = " beside your configuration" if confirmation is not None and confirmation.has_own else ""
    return (
        f"The search is over and expects most of {name_of(leader.candidate)}: trial {reading.number:04d} read "
        f"{metric.name} {metric.shown(reading.metrics[metric.name])}. Now it is confirmed{beside}."
    )


def answer_of(driver: StudyDriver) -> Answer | None:
    """Returns the answer of a study; None if nothing but the user's configuration completed, or completed again."""
    confirmation = confirmation_of(driver)
    if confirmation is not None and driver.time.is_over:
        confirmation.end_now()
    if confirmation is None or confirmation.next is not None:
        # A reading of a confirmation that was cut short is no second configuration. It may be of the user's own.
        readings = [result for result in driver.state.results.values() if result.purpose is not Purpose.CONFIRM]
        best = best_result(readings, driver.metric)
        if best is None or (driver.state.has_searched and not _others(driver).measured):
            return None
        value = gain(best, driver.state.submitted, driver.metric)
        name = name_of(driver.state.candidates[best.number])
        return Answer(best, None, value, name, step_accounts(driver, best))
    found = {
        "freeing": _freeing(driver),
        "left_out": driver.left_out,
        "instead": INSTEAD if driver.metric != driver.setup.arguments.metric else "",
        "left_unmeasured": "" if driver.state.submitted is None else driver.state.submitted.note,
        "others": _others(driver).note,
    }
    finding = confirmation.finding().model_copy(update=found)
    winner = finding.winner
    if winner is None or winner.number is None:
        return None
    finding = finding.model_copy(update={"in_code": _in_code(driver, driver.state.candidates[winner.number])})
    best = driver.state.results[winner.number].model_copy(update={"metrics": winner.metrics})
    value = 1.0 if winner.verdict == "own" else _value(winner.gain)
    return Answer(best, finding, value, winner.name, step_accounts(driver, best))


def cut_short(driver: StudyDriver) -> str:
    """Returns that the confirmation was cut, and why, as a sentence. Empty if it has come to its end or has not begun.

    Call it when the study ends.
    """
    confirmation = confirmation_of(driver)
    if confirmation is None or confirmation.next is None:
        return ""
    why = "the minutes of --max-minutes were over" if driver.time.is_over else "the study was interrupted"
    rounds = f"{confirmation.rounds} complete round{'' if confirmation.rounds == 1 else 's'}"
    return f"The confirmation was cut after {rounds}, because {why}."


def since_last_study(driver: StudyDriver) -> SinceLast | None:
    """Returns the confirmed winner beside that of the last study; None if the study does not learn from one."""
    answer = answer_of(driver)
    winner = None if answer is None or answer.finding is None else answer.finding.winner
    if winner is None:
        return None
    return since_last(
        driver.head_start.earlier, driver.head_start.now, driver.state.results, winner, driver.setup.device
    )


def no_answer(driver: StudyDriver) -> NoAnswer | None:
    """Returns why a study has no answer; None if it has one, or has not searched yet."""
    if not driver.state.has_searched or answer_of(driver) is not None:
        return None
    confirmation, others = confirmation_of(driver), _others(driver)
    if confirmation is not None:
        finding = confirmation.finding()
        return NoAnswer(finding.sentence, finding.failure)
    return NoAnswer(others.headline, others.reason if others.tried else _untried(driver))


def reason_of(driver: StudyDriver, status: StudyStatus, reason: str) -> str:
    """Returns why a study has ended, with a sentence if that has cut its confirmation. A failure says enough."""
    cut = "" if status is StudyStatus.FAILED else cut_short(driver)
    return f"{as_sentence(reason)} {cut}".lstrip() if cut else reason


def headline_of(driver: StudyDriver, status: StudyStatus) -> str:
    """Returns the answer of a study that has ended in one line, or that it has none. Empty if it was cut short.

    Args:
        driver: the study's.
        status: how it ended.
    """
    answer = answer_of(driver)
    # The best of an interrupted search is no answer.
    if answer is not None and (status is StudyStatus.COMPLETED or answer.finding is not None):
        return answer.sentence
    none = no_answer(driver) if status is StudyStatus.FAILED else None
    return "" if none is None else none.headline


def _untried(driver: StudyDriver) -> str:
    """Returns why the search tried nothing."""
    minutes, trials = driver.setup.arguments.max_minutes, driver.setup.arguments.max_trials
    if driver.state.stopped == MINUTES_OVER:
        return (
            f"The trials before the search and the wait for slots used up the {minutes:g} minutes of --max-minutes. "
            "Allow more, or wait until other studies have ended."
        )
    if trials <= 1:
        return f"--max-trials {trials} leaves no trial for another."
    return " ".join(
        [
            *driver.left_out,
            "The search has no other configuration that is allowed, fits and may be faster. Widen it: more ZeRO stages "
            "or knobs, a larger --max-micro-batch, or --free-batch.",
        ]
    )


def _others(driver: StudyDriver) -> Others:
    known, arguments = driver.known, driver.setup.experiment.entrypoint.arguments
    return others_of(driver.state, driver.metric, known.base_config, arguments, known.arg_mappings)


def _freeing(driver: StudyDriver) -> str:
    freed = None if driver.search is None else driver.search.freeing_gain()
    return "" if freed is None else freeing_advice(freed.candidate.micro_batch_size, freed.factor)


def _in_code(driver: StudyDriver, winner: Candidate) -> str:
    program = None if driver.state.profile is None else driver.state.profile.program
    stage = get_knob(winner.complete(driver.known.base_config), STAGE, 0)
    return partition_advice(stage, program is not None and program.partitions_its_model)


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value
