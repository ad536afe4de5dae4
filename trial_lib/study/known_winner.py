"""A study that learns from earlier ones: whether it has to search at all, and what its search starts from.

Each of these is read from the study's folder alone, so that a resumed study decides the same.
"""

from typing import TYPE_CHECKING

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.launch.trial import TrialPlan
from trial_lib.search.space_coordinates import SpaceCoordinates
from trial_lib.study.confirmation import Confirmation, Contender
from trial_lib.study.earlier_studies import EarlierStudy, Measured
from trial_lib.study.fingerprint import Fingerprint, fingerprint_in
from trial_lib.study.problem import kept_batch
from trial_lib.study.since_last import since_last

if TYPE_CHECKING:
    from trial_lib.study.driver import StudyDriver

# Activations of a sample (as a share) that may differ from run to run of the same model: its data do.
_SAME_ACTIVATIONS = 0.01
# What of an earlier search may be told to a search where only these have changed.
_SAME_SPEED = {"search"}
_SAME_MEMORY = {"search", "code"}
_TELLS_OF_MEMORY = (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_HOST_MEMORY)


def last_study(driver: "StudyDriver") -> EarlierStudy | None:
    """Returns the last of the earlier studies; None where there is none to learn from."""
    return driver.earlier[-1] if driver.earlier else None


def fingerprint_now(driver: "StudyDriver") -> Fingerprint:
    """Returns what the experiment is, as far as it is known."""
    begun = fingerprint_in(driver.paths)
    return begun if driver.profile is None else begun.with_profile(driver.profile)


def has_changed(driver: "StudyDriver") -> bool:
    """Returns whether anything that is known of has changed since the last study. The profile trial has ended."""
    last = last_study(driver)
    return last is None or bool(fingerprint_now(driver).changed_since(last.fingerprint))


def starting_from(driver: "StudyDriver") -> str:
    """Returns in a sentence what a study starts from, and why it searches; empty where it does not learn."""
    last = last_study(driver)
    if last is None:
        return "No earlier study of this experiment can be learned from." if driver.arguments.from_earlier else ""
    if not has_changed(driver):
        return f"Nothing has changed since {last.study_id}: its winner is measured again."
    changes = "; ".join(fingerprint_now(driver).changes_since(last.fingerprint))
    return f"Searching again, from the winner of {last.study_id} on. Changed since: {changes}."


# -- nothing has changed ---------------------------------------------------------------------------------------------


def known_confirmation(driver: "StudyDriver") -> Confirmation | None:
    """Returns the confirmation of the last study's winner, as far as it has come; None where something has changed."""
    last, profile = last_study(driver), driver.profile
    if last is None or profile is None or profile.outcome is not Outcome.COMPLETED or has_changed(driver):
        return None
    own = None if last.own is None else _contender(driver, last.own)
    confirmation = Confirmation(
        own,
        [_contender(driver, last.other)],
        driver.arguments.metric,
        driver.host.device,
        search_seconds=0.0,
        formats=profile.formats,
    )
    first = _first_of_search(driver)
    for result in _confirming(driver):
        if first is None or result.number < first:
            confirmation.tell(result)
    return confirmation


def next_known_plan(driver: "StudyDriver") -> TrialPlan | None:
    """Returns the next trial of the last study's winner or of the user's own; None when that is over or needless."""
    confirmation = known_confirmation(driver)
    candidate = None if confirmation is None else confirmation.next
    return None if candidate is None else driver.plan_again(Purpose.CONFIRM, candidate)


def holds(driver: "StudyDriver") -> bool:
    """Returns whether the last study's winner has been measured again, has won again, and is as fast as it was."""
    confirmation, last = known_confirmation(driver), last_study(driver)
    if confirmation is None or last is None or confirmation.next is not None:
        return False
    winner = confirmation.finding().winner
    if winner is None or (winner.verdict == "own") != (last.winner == "own"):
        return False
    compared = since_last(driver.earlier, fingerprint_now(driver), driver.results, winner, driver.host.device)
    return compared is not None and not compared.is_regression


def ended_on_known_winner(driver: "StudyDriver") -> bool:
    """Returns whether a study has come to its answer without a search: the winner held, or no time was left for one."""
    if not driver.has_searched or _first_of_search(driver) is not None:
        return False
    confirmation = known_confirmation(driver)
    return confirmation is not None and confirmation.next is None and confirmation.finding().winner is not None


def confirmed_after_search(driver: "StudyDriver") -> list[TrialResult]:
    """Returns the trials that confirm what a search has found; those of a known winner came before it."""
    first = _first_of_search(driver)
    return [result for result in _confirming(driver) if first is not None and result.number > first]


def _confirming(driver: "StudyDriver") -> list[TrialResult]:
    return [result for result in driver.results.values() if result.purpose is Purpose.CONFIRM]


def _first_of_search(driver: "StudyDriver") -> int | None:
    """Returns the number of the first trial that the search has asked for."""
    return min((number for number, purpose in driver.purposes.items() if purpose is Purpose.SEARCH), default=None)


def _contender(driver: "StudyDriver", measured: Measured) -> Contender:
    config_hash = measured.candidate.config_hash(driver.base_config)
    reading = measured.median.model_copy(update={"config_hash": config_hash})
    return Contender(measured.candidate, measured.candidate.complete(driver.base_config), reading)


# -- something has changed -------------------------------------------------------------------------------------------


def first_candidate(driver: "StudyDriver") -> Candidate | None:
    """Returns what a search starts from: the last study's winner, with the slots and the global batch of this one.

    The search is open. None where there is no winner, where it is the user's own configuration or none of the search's
    space any more, and where its micro-batch size does not go into that batch.
    """
    last = last_study(driver)
    if last is None or last.winner == "own" or driver.profile is None or driver.profile.profile is None:
        return None
    profile, known = driver.profile.profile, last.other.candidate
    if driver.search is None or SpaceCoordinates(driver.search.space).locate(known.knobs) is None:
        return None
    accumulation = known.gradient_accumulation_steps
    batch = kept_batch(driver.arguments, driver.base_config, profile, driver.log)
    if batch is not None:
        accumulation, left = divmod(batch, known.micro_batch_size * profile.data_parallel_size)
        if left or not accumulation:
            return None
    return Candidate(
        knobs=known.knobs,
        micro_batch_size=known.micro_batch_size,
        gradient_accumulation_steps=accumulation,
        slots=driver.experiment.config.resources.slots_per_trial,
        data_parallel_size=profile.data_parallel_size,
    )


def told_before(driver: "StudyDriver") -> list[tuple[Candidate, TrialResult]]:
    """Returns the trials of earlier studies that still hold, oldest first, for a search to learn from.

    All of a trial holds where nothing but the search itself has changed. Where the code has, and the model needs what
    it needed, what is known of its memory does. After any other change nothing is left but the winner.
    """
    known: list[tuple[Candidate, TrialResult]] = []
    # A search that nothing has led to but a winner that is not what it was: nobody knows what else is not.
    is_doubtful = not has_changed(driver)
    for study in driver.earlier:
        changed = set(fingerprint_now(driver).changed_since(study.fingerprint))
        if changed <= _SAME_SPEED and not is_doubtful:
            known += [(trial.candidate, trial.result) for trial in study.trials]
        elif changed <= _SAME_MEMORY and _needs_the_same(driver, study):
            known += [
                (trial.candidate, trial.result.model_copy(update={"metrics": {}}))
                for trial in study.trials
                if trial.result.outcome in _TELLS_OF_MEMORY
            ]
    return known


def _needs_the_same(driver: "StudyDriver", study: EarlierStudy) -> bool:
    profile = None if driver.profile is None else driver.profile.profile
    if profile is None:
        return False
    before, now = study.profile.activation_mem_per_gpu, profile.activation_mem_per_gpu
    return abs(now - before) <= _SAME_ACTIVATIONS * before
