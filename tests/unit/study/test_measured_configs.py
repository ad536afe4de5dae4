"""Which configurations a study has measured already."""

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.runner import MeasuredConfigs

HASH = "a" * 16
ASKED = Candidate(knobs={"zero_optimization": {"stage": 1}}, micro_batch_size=4)
OTHER_NAME = Candidate(knobs={"zero_optimization": {"stage": 1, "overlap_comm": True}}, micro_batch_size=4)


def ended(number: int, purpose: Purpose = Purpose.SEARCH, from_outside: bool = False) -> TrialResult:
    outcome = Outcome.CRASHED if from_outside else Outcome.COMPLETED
    return TrialResult(
        trial_id=f"s-{number}",
        number=number,
        purpose=purpose,
        config_hash=HASH,
        outcome=outcome,
        from_outside=from_outside,
    )


def test_what_nothing_has_run_is_to_be_run() -> None:
    assert MeasuredConfigs().known(HASH, ASKED) is None


def test_what_ran_for_another_purpose_or_under_another_name_is_known() -> None:
    measured = MeasuredConfigs()
    measured.add(ended(1, Purpose.SUBMITTED), OTHER_NAME)
    assert measured.known(HASH, ASKED) == 1
    measured.add(ended(2), OTHER_NAME)
    measured.add(ended(3, Purpose.CONFIRM), ASKED)
    assert measured.known(HASH, ASKED) == 1


def test_what_the_search_asks_for_again_by_the_same_name_is_to_be_run_again() -> None:
    measured = MeasuredConfigs()
    measured.add(ended(1, Purpose.SUBMITTED), ASKED)
    assert measured.known(HASH, ASKED) == 1
    measured.add(ended(2), ASKED)
    # As a search names it that knows how many replicas there are.
    assert measured.known(HASH, ASKED.model_copy(update={"data_parallel_size": 1})) is None


def test_a_trial_that_was_killed_from_outside_tells_nothing() -> None:
    measured = MeasuredConfigs()
    measured.add(ended(2, from_outside=True), OTHER_NAME)
    assert measured.known(HASH, ASKED) is None
