"""The order of the leaderboard, and the columns of every table of trials."""

from dataclasses import replace

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.study_view import LeaderboardRow, flat_knobs, leaderboard, trial_columns

CANDIDATES = {
    number: Candidate(knobs={"zero_optimization": {"stage": 1, "overlap_comm": True}}, micro_batch_size=number + 1)
    for number in range(6)
}


def trial(
    number: int, purpose: Purpose = Purpose.SEARCH, outcome: Outcome = Outcome.COMPLETED, **metrics: float
) -> TrialResult:
    return TrialResult(
        trial_id=f"study-{number:04d}",
        number=number,
        purpose=purpose,
        config_hash=str(number),
        outcome=outcome,
        reason="" if outcome is Outcome.COMPLETED else "No room.",
        metrics=metrics,
        memory=Memory(peak=[2**20, 3 * 2**20]),
    )


def test_a_row_has_the_name_of_its_candidate_in_the_study() -> None:
    changed = Candidate(knobs={"zero_optimization": {"stage": 1, "overlap_comm": False}}, micro_batch_size=3)
    candidates = {**CANDIDATES, 6: changed, 7: changed}
    results = {6: trial(6, throughput=2.0), 7: trial(7, Purpose.CONFIRM, throughput=1.0)}
    rows = leaderboard(results, candidates, "throughput")
    assert [row.label for row in rows] == ["z1-mbs3-no-overlap", "confirm-z1-mbs3-no-overlap"]


RESULTS = {
    result.number: result
    for result in (
        trial(0, Purpose.PROFILE, latency=0.001, throughput=999.0),
        trial(1, Purpose.SUBMITTED, latency=0.2, throughput=10.0),
        trial(5, outcome=Outcome.CRASHED),
        trial(2, latency=0.3, throughput=30.0),
        trial(3, outcome=Outcome.OUT_OF_MEMORY),
        trial(4, latency=0.3, throughput=30.0),
    )
}


def test_completed_trials_stand_first_best_to_worst_then_the_failed_ones_in_their_order() -> None:
    assert [row.trial for row in leaderboard(RESULTS, CANDIDATES, "throughput")] == [2, 4, 1, 3, 5]


def test_a_metric_of_time_is_best_when_it_is_smallest() -> None:
    assert [row.trial for row in leaderboard(RESULTS, CANDIDATES, "latency")] == [1, 2, 4, 3, 5]


def cells(row: LeaderboardRow) -> dict[str, str]:
    return {column.name: column.cell(row) for column in trial_columns("prefect", row.metric)}


def test_a_row_shows_its_metric_memory_of_the_worst_rank_and_knobs() -> None:
    row = cells(leaderboard(RESULTS, CANDIDATES, "latency")[1])
    assert row["trial"] == "0002"
    assert row["candidate"] == "z1-mbs3"
    assert row["latency"] == "300.0 ms"
    assert row["peak memory"] == "3.0 MiB"
    assert row["knobs"] == "stage=1 overlap_comm=True"


def test_a_failed_trial_shows_its_reason_in_place_of_a_value() -> None:
    row = cells(leaderboard(RESULTS, CANDIDATES, "latency")[3])
    assert (row["outcome"], row["reason"], row["latency"], row["samples/s"]) == ("out_of_memory", "No room.", "", "")
    assert row["measured"] == ""


def test_no_trial_has_ended_yet() -> None:
    assert leaderboard({}, {}, "throughput") == []


def test_a_row_says_whether_its_processes_had_measured_another_size_before() -> None:
    results = {**RESULTS, 2: replace(RESULTS[2], swept=True)}
    measured = {row.trial: row.measured for row in leaderboard(results, CANDIDATES, "throughput")}
    assert measured == {1: "fresh", 2: "swept", 3: "fresh", 4: "fresh", 5: "fresh"}


def test_switches_of_the_program_are_words_as_people_read_them():
    program = {"--twice": False, "OMP_NUM_THREADS": 2, "OWN": None}
    knobs = {"zero_optimization": {"stage": 1}, "program": program}
    assert flat_knobs(knobs) == "stage=1 no --twice OMP_NUM_THREADS=2 OWN as typed"
