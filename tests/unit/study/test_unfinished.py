"""What is left of a study that was cut short: of a sweep, what its process group would have continued with."""

from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.history import Proposal, Withdrawn, stays_open, unfinished_work, unrecorded_ends

CANDIDATES = tuple(Candidate(micro_batch_size=size) for size in (1, 2, 4, 8))
SWEEP = Sweep(CANDIDATES, bytes_per_sample=100.0, headroom=0.0)
PROPOSAL = Proposal(list(enumerate(CANDIDATES, 5)), SWEEP)


def ended(number: int, need: int, outcome: Outcome = Outcome.COMPLETED) -> TrialResult:
    memory = Memory(peak=[1000 + need], after_initialize=[1000], available=[500])
    return TrialResult(
        trial_id=str(number), number=number, purpose=Purpose.SEARCH, config_hash="", outcome=outcome, memory=memory
    )


def numbers(left: list[Proposal]) -> list[list[int]]:
    return [[number for number, _ in decision.numbered] for decision in left]


@pytest.mark.parametrize("purpose", [Purpose.PROFILE, Purpose.SUBMITTED])
def test_what_a_study_stands_on_is_run_again_when_it_was_killed_from_outside(purpose: Purpose) -> None:
    killed = replace(ended(0, need=100, outcome=Outcome.CRASHED), from_outside=True)
    assert stays_open(replace(killed, purpose=purpose))
    assert not stays_open(replace(killed, purpose=purpose, from_outside=False))
    assert not stays_open(killed)  # one of the search


def test_what_came_to_another_kind_of_device_is_run_again_once_that_is_mended() -> None:
    elsewhere = replace(ended(0, need=100, outcome=Outcome.INVALID), elsewhere=True)
    assert stays_open(elsewhere)
    assert not stays_open(replace(elsewhere, elsewhere=False))


def test_a_sweep_that_had_not_begun_is_run_whole() -> None:
    left, given_up = unfinished_work([PROPOSAL], {}, {})
    assert (numbers(left), given_up) == ([[5, 6, 7, 8]], [])
    assert left[0].sweep is SWEEP


def test_a_sweep_goes_on_to_the_sizes_that_fit() -> None:
    left, given_up = unfinished_work([PROPOSAL], {5: ended(5, need=100), 6: ended(6, need=200)}, {})
    assert (numbers(left), given_up) == ([[7, 8]], [])


def test_a_size_that_its_group_would_have_foreseen_not_to_fit_is_not_measured() -> None:
    left, given_up = unfinished_work([PROPOSAL], {5: ended(5, need=200), 6: ended(6, need=400)}, {})
    assert left == []
    assert given_up == [Withdrawn(7, Withdrawal.MEMORY), Withdrawn(8, Withdrawal.MEMORY)]


def test_nothing_is_measured_beyond_a_size_whose_allocator_had_to_make_room() -> None:
    edge = ended(6, need=1)
    edge = replace(edge, memory=replace(edge.memory, counted_retries=[1]))
    left, given_up = unfinished_work([PROPOSAL], {5: ended(5, need=1), 6: edge}, {})
    assert left == []
    assert given_up == [Withdrawn(7, Withdrawal.MEMORY), Withdrawn(8, Withdrawal.MEMORY)]


def test_nothing_is_measured_beyond_a_size_that_failed() -> None:
    results = {5: ended(5, need=1), 6: ended(6, need=1, outcome=Outcome.OUT_OF_MEMORY)}
    left, given_up = unfinished_work([PROPOSAL], results, {})
    assert left == []
    assert given_up == [Withdrawn(7, Withdrawal.ENDED), Withdrawn(8, Withdrawal.ENDED)]


def test_a_sweep_that_had_begun_to_be_given_up_is_given_up() -> None:
    left, given_up = unfinished_work([PROPOSAL], {5: ended(5, 1), 6: ended(6, 1)}, {7: Withdrawal.NOT_REPEATABLE})
    assert (left, given_up) == ([], [Withdrawn(8, Withdrawal.NOT_REPEATABLE)])


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.OUT_OF_MEMORY])
def test_a_later_size_that_was_known_already_says_nothing_of_the_group(outcome: Outcome) -> None:
    left, given_up = unfinished_work([PROPOSAL], {8: ended(8, need=450, outcome=outcome)}, {})
    assert (numbers(left), given_up) == ([[5, 6, 7]], [])


def test_single_trials_are_run_again_and_ended_ones_are_not() -> None:
    single = [Proposal([(number, candidate)]) for number, candidate in PROPOSAL.numbered]
    left, given_up = unfinished_work(single, {5: ended(5, 1, Outcome.OUT_OF_MEMORY), 7: ended(7, 1)}, {})
    assert (numbers(left), given_up) == ([[6], [8]], [])


def test_a_trial_that_had_ended_unheard_is_not_run_again(tmp_path: Path) -> None:
    paths = StudyPaths(tmp_path)
    written = {5: ended(5, 1), 6: ended(6, 1, Outcome.CANCELLED), 7: ended(7, 1, Outcome.CRASHED), 8: ended(8, 1)}
    for number, result in written.items():
        paths.trial(number).root.mkdir(parents=True)
        paths.trial(number).result.write_text(result.to_text())
    paths.trial(8).result.write_text('{"torn')
    assert list(unrecorded_ends(paths, {8, 7, 6, 5, 4})) == [written[5], written[7]]
