"""A study that learns: if the winner of the last study holds, it needs no search.

Every function reads the study's folder alone, so a resumed study decides the same.
"""

from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.study.confirmation import Confirmation, Contender
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier import EarlierConfirmed, since_last
from trial_lib.study.why import traced_once


def starting_from(driver: StudyDriver) -> str:
    """A sentence about the start of a study and the reason for its search; empty if it does not learn."""
    last = driver.head_start.last
    if last is None:
        return "No earlier study of this experiment can be learned from." if driver.setup.arguments.from_earlier else ""
    if not driver.head_start.has_changed:
        return f"Nothing has changed since {last.study_id}, so its winner is measured again."
    changes = "; ".join(driver.head_start.now.changes_since(last.fingerprint))
    return f"The search runs again, from the winner of {last.study_id}. Changed since: {changes}."


def known_confirmation(driver: StudyDriver) -> Confirmation | None:
    """The confirmation of the last study's winner, as far as it has come; None if something has changed."""
    last, profile = driver.head_start.last, driver.state.profile
    if last is None or profile is None or profile.outcome is not Outcome.COMPLETED or driver.head_start.has_changed:
        return None
    own = None if last.own is None else _contender(driver, last.own)
    confirmation = Confirmation(
        own,
        [_contender(driver, last.other)],
        driver.metric,
        driver.setup.device,
        search_seconds=0.0,
        formats=profile.formats,
        free=driver.setup.free_switches,
    )
    first = _first_of_search(driver)
    for result in driver.state.of_purpose(Purpose.CONFIRM):
        if first is None or result.number < first:
            confirmation.tell(result)
    return confirmation


def next_known_plan(driver: StudyDriver) -> TrialPlan | None:
    """The next trial of the last winner or of the user's configuration; None when that is over."""
    confirmation = known_confirmation(driver)
    candidate = None if confirmation is None else confirmation.next
    return None if candidate is None else traced_once(driver, driver.plan_again(Purpose.CONFIRM, candidate))


def holds(driver: StudyDriver) -> bool:
    """Whether the last study's winner was measured again, has won again, and is as fast as it was."""
    confirmation, last = known_confirmation(driver), driver.head_start.last
    if confirmation is None or last is None or confirmation.next is not None:
        return False
    winner = confirmation.finding().winner
    if winner is None or (winner.verdict == "own") != (last.winner == "own"):
        return False
    compared = since_last(
        driver.head_start.earlier, driver.head_start.now, driver.state.results, winner, driver.setup.device
    )
    return compared is not None and not compared.is_regression


def ended_on_known_winner(driver: StudyDriver) -> bool:
    """Whether a study has its answer without a search: the winner held, or no time was left."""
    if not driver.state.has_searched or _first_of_search(driver) is not None:
        return False
    confirmation = known_confirmation(driver)
    return confirmation is not None and confirmation.next is None and confirmation.finding().winner is not None


def confirmed_after_search(driver: StudyDriver) -> list[TrialResult]:
    """The trials that confirm the result of the search. Those of a known winner come before it."""
    first = _first_of_search(driver)
    return [
        result for result in driver.state.of_purpose(Purpose.CONFIRM) if first is not None and result.number > first
    ]


def _first_of_search(driver: StudyDriver) -> int | None:
    return min((number for number, purpose in driver.state.purposes.items() if purpose is Purpose.SEARCH), default=None)


def _contender(driver: StudyDriver, measured: EarlierConfirmed) -> Contender:
    config_hash = measured.candidate.config_hash(driver.known.base_config)
    reading = measured.median.model_copy(update={"config_hash": config_hash})
    return Contender(measured.candidate, measured.candidate.complete(driver.known.base_config), reading)
