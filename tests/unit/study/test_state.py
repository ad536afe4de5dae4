"""The state of a study is its history, folded: the driver, the report and the live table read the same."""

from pathlib import Path

from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.history import (
    Asked,
    AskedSweep,
    Event,
    Stopped,
    StudyState,
    Told,
    Withdrawn,
    read_history,
)

RECORDED = Path(__file__).parents[2] / "recorded_study" / "history.jsonl"
SIZES = [Candidate(micro_batch_size=size) for size in (1, 2, 4)]


def told(number: int, purpose: Purpose) -> Told:
    result = TrialResult(
        trial_id=f"s-{number}", number=number, purpose=purpose, config_hash="", outcome=Outcome.COMPLETED
    )
    return Told(number, result)


BEGUN: list[Event] = [
    Asked(0, Purpose.PROFILE, SIZES[1]),
    Asked(0, Purpose.PROFILE, SIZES[0]),
    told(0, Purpose.PROFILE),
    Asked(1, Purpose.SUBMITTED, SIZES[1]),
    told(1, Purpose.SUBMITTED),
    AskedSweep(2, Sweep(tuple(SIZES), bytes_per_sample=1.0, headroom=0.0)),
    told(2, Purpose.SEARCH),
    Withdrawn(4, Withdrawal.MEMORY),
]


def test_a_study_before_its_first_event_has_no_trials_and_leaves_two_numbers_free() -> None:
    state = StudyState()
    assert (dict(state.candidates), dict(state.results), state.searched) == ({}, {}, 0)
    assert (state.profile, state.submitted, state.has_searched) == (None, None, False)
    assert state.next_number == 2


def test_every_event_moves_the_state_on() -> None:
    state = StudyState(BEGUN)
    assert state.candidates == {0: SIZES[0], 1: SIZES[1], 2: SIZES[0], 3: SIZES[1]}
    assert state.running == {3: SIZES[1]}
    assert list(state.results) == [0, 1, 2]
    assert state.withdrawn == {4: Withdrawal.MEMORY}
    assert state.purposes[4] is Purpose.SEARCH
    assert (state.searched, state.next_number) == (2, 5)
    assert [result.number for result in state.of_purpose(Purpose.SEARCH)] == [2]
    assert state.profile is state.results[0]
    assert state.submitted is state.results[1]
    assert not state.has_searched
    state.apply(Stopped("its minutes are over"))
    assert (state.stopped, state.has_searched) == ("its minutes are over", True)


def test_a_reader_of_a_long_study_need_not_keep_the_trials_that_have_ended() -> None:
    whole, brief = StudyState(BEGUN), StudyState(BEGUN, keeps_ended=False)
    assert (brief.running, brief.searched, brief.next_number) == (whole.running, whole.searched, whole.next_number)
    assert (dict(brief.candidates), dict(brief.results)) == (dict(brief.running), {})


def test_a_recorded_study_reads_the_same_line_by_line_and_at_once() -> None:
    events = read_history(RECORDED)
    state = StudyState(events[:7])
    for event in events[7:]:
        state.apply(event)
    at_once = StudyState(events)
    assert state.results == at_once.results
    assert state.candidates == at_once.candidates
    assert len(at_once.results) == sum(isinstance(event, Told) for event in events)
    assert set(at_once.candidates) == {*at_once.results, *at_once.running}


def test_trials_that_differ_in_a_fine_knob_have_names_that_show_it() -> None:
    def candidate(overlap: bool) -> Candidate:
        return Candidate(knobs={"zero_optimization": {"stage": 2, "overlap_comm": overlap}}, micro_batch_size=16)

    state = StudyState([Asked(2, Purpose.SEARCH, candidate(True)), Asked(3, Purpose.SEARCH, candidate(False))])
    assert (state.label(2), state.label(3)) == ("z2-mbs16", "z2-mbs16-no-overlap")
    state.apply(Asked(4, Purpose.CONFIRM, candidate(False)))
    assert state.label(4) == "confirm-z2-mbs16-no-overlap"
