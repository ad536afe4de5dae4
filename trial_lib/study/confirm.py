"""The last step of a study: the trial that confirms next, and the answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyStatus
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult, as_sentence
from zerotune.trial_lib.records.step_account import StepAccount, advice_on
from zerotune.trial_lib.records.units import NONE_FASTER_ONCE, gain_line, name_of
from zerotune.trial_lib.search.base import key_in_plan, switches_in
from zerotune.trial_lib.search.knobs import STAGE, get_knob
from zerotune.trial_lib.search.methods import METHODS
from zerotune.trial_lib.search.zero_settings import ZeroSettings
from zerotune.trial_lib.study.arguments import INSTEAD, MINUTES_OVER
from zerotune.trial_lib.study.beside import besides_of, with_ways
from zerotune.trial_lib.study.confirmation import Confirmation, Contender, is_good, ranking
from zerotune.trial_lib.study.driver import StudyDriver, best_result
from zerotune.trial_lib.study.earlier import EarlierConfirmed, SinceLast
from zerotune.trial_lib.study.finding import Finding, freeing_advice, partition_advice
from zerotune.trial_lib.study.others import Others, others_of
from zerotune.trial_lib.study.published import own_training, published_for
from zerotune.trial_lib.study.reduction import Reduction, reduction_of
from zerotune.trial_lib.study.runner import seconds_of

# Marks lines of a study's log that a command prints when it has ended, and not before.
OF_THE_ANSWER = {"is_of_the_answer": True}


@dataclass(frozen=True)
class NoAnswer:
    """Why a study that has searched has no answer."""

    headline: str  # that there is none, in one sentence
    reason: str  # why, with the remedy

    @property
    def sentence(self) -> str:
        return f"{self.headline} {self.reason}".rstrip()


@dataclass(frozen=True)
class Answer:
    # The winner's trial. If it was confirmed, the median one of its confirming trials, with the metrics of all.
    best: TrialResult
    finding: Finding | None  # the result of the confirmation. None if there was none.
    gain: float | None  # the winner's gain over the user's configuration. None if there is nothing to compare.
    name: str  # the winner's name in a sentence
    # Where the time of a step goes: of the winner, of the user's configuration, and of arms
    why: tuple[StepAccount, ...] = ()

    @property
    def sentence(self) -> str:
        """Empty if nothing was confirmed and there is nothing to compare."""
        if self.finding is not None:
            return self.finding.sentence
        if self.best.purpose is Purpose.SUBMITTED:
            return NONE_FASTER_ONCE
        return "" if self.gain is None else gain_line(self.gain, self.name)

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """None if the gain is from one measurement each, or there is none."""
        if self.finding is None or self.finding.winner is None or self.finding.winner.gain is None:
            return None
        return self.finding.winner.gain.low, self.finding.winner.gain.high

    def document(self, driver: StudyDriver) -> dict[str, Any]:
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
    """The confirmation of a study, as far as it has come; None before its search has ended.

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
    return _confirmation(driver, own, ranked, seconds_of(before), candidate)


def _confirmation(
    driver: StudyDriver,
    own: Contender | None,
    ranked: Sequence[Contender],
    search_seconds: float = 0.0,
    submitted: Candidate | None = None,
    is_known: bool = False,
) -> Confirmation:
    # With its trials so far. Those of a known winner come before the search, and the others after it.
    state, setup, program = driver.state, driver.setup, driver.known.found
    formats = () if program is None else tuple(program.formats)
    varies = program is not None and program.longest_sequence is not None
    across = None if program is None else program.across_rows
    of_study = (search_seconds, submitted, formats, setup.free_switches)
    beside = partial(besides_of, setup.arguments.beside, base_config=driver.known.base_config)
    confirmation = Confirmation(own, ranked, driver.metric, *of_study, data_vary=varies, across=across, beside=beside)
    first = _first_of_search(driver)
    for result in state.of_purpose(Purpose.CONFIRM):
        if is_known is (first is None or result.number < first):
            confirmation.tell(result)
    return confirmation


def _contender(driver: StudyDriver, reading: TrialResult, expected: float | None = None) -> Contender:
    candidate = driver.state.candidates[reading.number]
    return Contender(candidate, candidate.complete(driver.known.base_config), reading, expected)


def next_confirming_plan(driver: StudyDriver) -> TrialPlan | None:
    """The next confirming trial, in fresh processes and alone; None when the confirmation is over.

    Trials that weigh the changes of the winner come after those that have found it.
    """
    confirmation = confirmation_of(driver)
    return _next_plan(driver, confirmation) or _next_plan(driver, _reduction(driver, confirmation))


def _reduction(driver: StudyDriver, confirmation: Confirmation | None) -> Reduction | None:
    # A known winner was reduced by the study that has found it.
    if confirmation is None or confirmation.next is not None or ended_on_known_winner(driver):
        return None
    apart = (lambda one, other: None) if driver.search is None else driver.search.apart
    return reduction_of(driver.setup, driver.state, driver.known.base_config, apart, confirmation, driver.metric)


def _next_plan(driver: StudyDriver, measuring: Confirmation | Reduction | None) -> TrialPlan | None:
    # It traces steps after the counted ones, unless a trial of this configuration has done so. What is only weighed is
    # not traced: the whole winner was. Nor is the trial in other rounding, of which nobody asks where its time goes.
    if measuring is None or measuring.next is None:
        return None
    plan = driver.plan_again(Purpose.CONFIRM, measuring.next)
    plan = measuring.data.in_round(plan, driver.setup.arguments.random_seed, measuring.begun)
    same = (result for result in driver.state.results.values() if result.config_hash == plan.config_hash)
    traces = measuring.traces and all(result.traced is None for result in same)
    return replace(plan, traces=traces, rounding=measuring.rounding)


def search_found(driver: StudyDriver) -> str:
    """Which configuration the search expects most of; empty if none is confirmed, or one has been already."""
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
    """None if nothing but the user's configuration completed, or completed again."""
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
    freed = None if driver.search is None else driver.search.freeing_gain()
    found = {
        "freeing": "" if freed is None else freeing_advice(freed.candidate.micro_batch_size, freed.factor),
        "left_out": driver.left_out,
        "instead": INSTEAD if driver.metric != driver.setup.arguments.metric else "",
        "left_unmeasured": "" if driver.state.submitted is None else driver.state.submitted.note,
        "others": _others(driver).note,
    }
    finding, reduction = confirmation.finding(), _reduction(driver, confirmation)
    whole = finding.winner
    if reduction is not None and driver.state.submitted is not None:
        reduction.end_now(_why_over(driver))
        finding = reduction.applied(finding, driver.state.candidates[driver.state.submitted.number])
    finding = finding.model_copy(update=found)
    winner = finding.winner
    if winner is None or winner.number is None:
        return None
    finding = with_ways(finding, driver.setup, driver.known.found)
    best = replace(driver.state.results[winner.number], metrics=winner.metrics)
    model = None if driver.state.profile is None else driver.state.profile.profile
    stage = get_knob(driver.state.candidates[winner.number].complete(driver.known.base_config), STAGE, 0)
    program = driver.known.found
    said = {
        "in_code": partition_advice(stage, program is not None and program.partitions_its_model),
        "published": published_for(own_training(best, model)),
    }
    finding = finding.model_copy(update=said)
    value = 1.0 if winner.verdict == "own" else None if winner.gain is None else winner.gain.value
    traced = driver.state.results[whole.number] if whole is not None and whole.number is not None else best
    return Answer(best, finding, value, winner.name, step_accounts(driver, traced))


def cut_short(driver: StudyDriver) -> str:
    """That the confirmation was cut, and why, when the study ends. Empty if it has come to its end or has not begun."""
    confirmation = confirmation_of(driver)
    if confirmation is None or confirmation.next is None:
        return ""
    if driver.time.is_over:
        confirmation.end_now()
    rounds = f"{confirmation.rounds} complete round{'' if confirmation.rounds == 1 else 's'}"
    return f"The confirmation was cut after {rounds}, because {_why_over(driver)}."


def _why_over(driver: StudyDriver) -> str:
    return "the minutes of --max-minutes were over" if driver.time.is_over else "the study was interrupted"


def since_last_study(driver: StudyDriver) -> SinceLast | None:
    """The confirmed winner beside that of the last study; None if the study does not learn from one."""
    answer = answer_of(driver)
    winner = None if answer is None or answer.finding is None else answer.finding.winner
    if winner is None:
        return None
    return driver.advice.head_start.since_last(driver.state.results, winner, driver.setup.device)


def no_answer(driver: StudyDriver) -> NoAnswer | None:
    """Why a study has no answer; None if it has one, or has not searched yet."""
    if not driver.state.has_searched or answer_of(driver) is not None:
        return None
    confirmation, others = confirmation_of(driver), _others(driver)
    if confirmation is not None:
        finding = confirmation.finding()
        return NoAnswer(finding.sentence, finding.failure)
    return NoAnswer(others.headline, others.reason if others.tried else _untried(driver))


def reason_of(driver: StudyDriver, status: StudyStatus, reason: str) -> str:
    """Why a study has ended, with a sentence if that has cut its confirmation. A failure says enough."""
    cut = "" if status is StudyStatus.FAILED else cut_short(driver)
    return f"{as_sentence(reason)} {cut}".lstrip() if cut else reason


def headline_of(driver: StudyDriver, status: StudyStatus) -> str:
    """The answer of a study that has ended so, or that it has none, in one line. Empty if it was cut short."""
    answer = answer_of(driver)
    # The best of an interrupted search is no answer.
    if answer is not None and (status is StudyStatus.COMPLETED or answer.finding is not None):
        return answer.sentence
    none = no_answer(driver) if status is StudyStatus.FAILED else None
    return "" if none is None else none.headline


def _untried(driver: StudyDriver) -> str:
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


# A study that learns: if the winner of the last study holds, it needs no search. A resumed study decides the same,
# because every function reads the study's folder alone.


def starting_from(driver: StudyDriver) -> str:
    """A sentence about the start of a study and the reason for its search; empty if it does not learn."""
    start = driver.advice.head_start
    last = start.last
    if last is None:
        return "No earlier study of this experiment can be learned from." if driver.setup.arguments.from_earlier else ""
    if not start.has_changed:
        return f"Nothing has changed since {last.study_id}, so its winner is measured again."
    changes = "; ".join(start.now.changes_since(last.fingerprint))
    return f"The search runs again, from the winner of {last.study_id}. Changed since: {changes}."


def known_confirmation(driver: StudyDriver) -> Confirmation | None:
    """The confirmation of the last study's winner, as far as it has come; None if something has changed."""
    start, profile = driver.advice.head_start, driver.state.profile
    last = start.last
    if last is None or profile is None or profile.outcome is not Outcome.COMPLETED or start.has_changed:
        return None
    own = None if last.own is None else _known_contender(driver, last.own)
    return _confirmation(driver, own, [_known_contender(driver, last.other)], is_known=True)


def next_known_plan(driver: StudyDriver) -> TrialPlan | None:
    """The next trial of the last winner or of the user's configuration; None when that is over."""
    return _next_plan(driver, known_confirmation(driver))


def holds(driver: StudyDriver) -> bool:
    """Whether the last study's winner was measured again, has won again, and is as fast as it was."""
    confirmation, last = known_confirmation(driver), driver.advice.head_start.last
    if confirmation is None or last is None or confirmation.next is not None:
        return False
    winner = confirmation.finding().winner
    if winner is None or (winner.verdict == "own") != (last.winner == "own"):
        return False
    compared = driver.advice.head_start.since_last(driver.state.results, winner, driver.setup.device)
    return compared is not None and compared.ratio is not None and not compared.is_regression


def ended_on_known_winner(driver: StudyDriver) -> bool:
    """Whether a study has its answer without a search: the winner held, or no time was left."""
    if not driver.state.has_searched or _first_of_search(driver) is not None:
        return False
    confirmation = known_confirmation(driver)
    return confirmation is not None and confirmation.next is None and confirmation.finding().winner is not None


def _first_of_search(driver: StudyDriver) -> int | None:
    return min((number for number, purpose in driver.state.purposes.items() if purpose is Purpose.SEARCH), default=None)


def _known_contender(driver: StudyDriver, measured: EarlierConfirmed) -> Contender:
    config_hash = measured.candidate.config_hash(driver.known.base_config)
    reading = replace(measured.median, config_hash=config_hash)
    return Contender(measured.candidate, measured.candidate.complete(driver.known.base_config), reading)


# Where the time of a step goes: of the answer, of the user's configuration, and of each arm. The figures are those of
# traced trials. An arm without one gets what the study's plan has foreseen for it, or nothing.

_OWN = "your configuration"
_NEVER_TRACED = "No trial of it was traced."


def step_accounts(driver: StudyDriver, best: TrialResult) -> tuple[StepAccount, ...]:
    """The accounts of a study: the winner's, the user's, then those of other configurations and arms."""
    own = driver.state.submitted
    is_own = best.purpose is Purpose.SUBMITTED or (own is not None and own.config_hash == best.config_hash)
    found = [_of_trial(driver, best, "own" if is_own else "winner")]
    if own is not None and not is_own:
        found.append(_of_trial(driver, own, "own"))
    accounted = {best.config_hash, *(() if own is None else (own.config_hash,))}
    for result in driver.state.results.values():
        if result.config_hash not in accounted and result.traced is not None and result.traced.shares:
            accounted.add(result.config_hash)
            found.append(_of_trial(driver, result, "other"))
    return (*found, *_foreseen(driver, found))


def _of_trial(driver: StudyDriver, result: TrialResult, role: str) -> StepAccount:
    same = [each for each in driver.state.results.values() if each.config_hash == result.config_hash]
    traced = [each for each in same if each.traced is not None]
    good = next((each for each in traced if each.traced is not None and each.traced.shares), None)
    name = _OWN if role == "own" else name_of(driver.state.candidates[result.number])
    named = {"name": name, "role": role}
    if good is None or good.traced is None:
        failure = next((each.traced.failure for each in traced if each.traced is not None), _NEVER_TRACED)
        return StepAccount(**named, basis="none", failure=failure)
    seconds, step = good.metrics.get("latency", good.traced.seconds), good.traced
    config = driver.state.candidates[good.number].complete(driver.known.base_config)
    return StepAccount(
        **named,
        basis="traced",
        trial=good.number,
        seconds=seconds,
        shares=step.shares,
        slowed=step.seconds / seconds if seconds else 1.0,
        advice=advice_on(step.shares, config, driver.setup.device, _measured_stages(driver)),
    )


def _measured_stages(driver: StudyDriver) -> set[int]:
    state, base = driver.state, driver.known.base_config
    configs = [
        state.candidates[number].complete(base)
        for number, result in state.results.items()
        if result.outcome is Outcome.COMPLETED and result.purpose is not Purpose.PROFILE
    ]
    return {ZeroSettings.of(config).stage for config in configs}


def _foreseen(driver: StudyDriver, accounts: list[StepAccount]) -> Iterator[StepAccount]:
    # Of the arms that were tried and not traced, if the study began with a plan for its devices. The plan's figures are
    # those of the arm's best micro-batch.
    plan, state, base = driver.advice.plan, driver.state, driver.known.base_config
    if plan is None or plan.cluster is None:
        return
    foreseen = switches_in(plan.expected)
    candidates = state.candidates.items()
    keys = {number: key_in_plan(candidate.complete(base), base, foreseen) for number, candidate in candidates}
    traced = {keys[account.trial] for account in accounts if account.trial is not None}
    tried = {keys[number] for number, result in state.results.items() if result.purpose is not Purpose.PROFILE}
    for arm in plan.devices.arms:
        total = sum(arm.seconds.values())
        if plan.key_of(arm) in tried - traced and not arm.stopped and total > 0:
            shares = {part: seconds / total for part, seconds in arm.seconds.items() if seconds > 0}
            name = f"{arm.label}, micro-batch {arm.micro_batch}"
            yield StepAccount(name=name, role="arm", basis="foreseen", seconds=total, shares=shares)


def gain(best: TrialResult, submitted: TrialResult | None, metric: str) -> float | None:
    """How many times better the best trial is than the user's configuration; None if that did not complete."""
    if submitted is None or submitted.outcome is not Outcome.COMPLETED:
        return None
    ours, theirs = best.metrics[metric], submitted.metrics[metric]
    if SEARCH_METRICS[metric].smaller_is_better:
        ours, theirs = theirs, ours
    # A model without a matrix product has no FLOPs to compare.
    return ours / theirs if theirs else None
