"""How many samples a confirming trial counts, where its data begin, and what is said of that."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.data_window import DataWindow, offset_of_round


def candidate(micro_batch: int, accumulation: int = 1) -> Candidate:
    return Candidate(micro_batch_size=micro_batch, gradient_accumulation_steps=accumulation, slots=2)


def reading(step_times: list[float], batch: int, spread: float = 0.0, **fields: Any) -> TrialResult:
    latency = sum(step_times) / len(step_times)
    metrics = {"throughput": batch / latency, "latency": latency, "data_spread": spread}
    return TrialResult(
        trial_id="s-1",
        number=1,
        purpose=Purpose.CONFIRM,
        config_hash="x",
        outcome=Outcome.COMPLETED,
        metrics={**metrics, "measured_steps": len(step_times)},
        step_times=step_times,
        phases={"start": 2.0, "steps": sum(step_times)},
        **fields,
    )


STEADY = [(candidate(2, 8), reading([0.1] * 5, 32)), (candidate(16), reading([0.05] * 5, 32))]
VARIED = [(one, replace(result, metrics={**result.metrics, "data_spread": 0.4})) for one, result in STEADY]


@pytest.mark.parametrize("rounds", [4, 6, 8, 24])
def test_rounds_are_spread_over_the_whole_epoch(rounds: int) -> None:
    places = sorted(offset_of_round(42, number) for number in range(rounds))
    gaps = [after - before for before, after in zip(places, [*places[1:], 1.0 + places[0]], strict=True)]
    assert max(gaps) < 2.0 / rounds
    assert places != sorted(offset_of_round(43, number) for number in range(rounds))


def test_where_steps_do_not_differ_a_trial_counts_as_in_the_search() -> None:
    assert DataWindow.of(STEADY, varies=False, round_s=60.0).samples == 0


@pytest.mark.parametrize(("members", "varies"), [(VARIED, False), (STEADY, True)])
def test_where_they_do_all_count_the_same_samples(members: Any, varies: bool) -> None:
    data = DataWindow.of(members, varies, round_s=60.0)
    assert data.samples >= 16 * 32
    windows = [data.in_round(plan(one), 42, 0).window for one, _ in members]
    steps = data.samples // 32
    assert windows[0] == windows[1] == StepWindow(3, 2 + steps, max_steps=steps, least_steps=3)
    # Of a program that ends before.
    assert (windows[0].min_steps, windows[0].enough_at_end) == (steps, 3)


def test_more_scatter_needs_a_longer_window_within_the_seconds_of_a_round() -> None:
    little, much, bounded = (
        DataWindow.of(
            [(one, replace(each, metrics={**each.metrics, "data_spread": spread})) for one, each in STEADY],
            False,
            seconds,
        )
        for spread, seconds in ((0.1, 60.0), (0.8, 60.0), (0.8, 8.0))
    )
    assert little.samples < bounded.samples < much.samples
    # A round has two starts of 2 s. The rest is for the steps of both.
    assert bounded.samples * (1 / 320 + 1 / 640) == pytest.approx(4.0, rel=0.1)


def test_a_program_that_logs_every_tenth_step_is_measured_in_whole_tens() -> None:
    logs = [0.3 if step % 10 == 7 else 0.1 for step in range(40)]
    data = DataWindow.of([(candidate(2, 8), reading(logs, 32)), STEADY[1]], varies=False, round_s=60.0)
    assert data.samples % (10 * 32) == 0
    assert data.samples > 0


def test_with_a_freed_batch_all_count_from_the_same_sample_on() -> None:
    members = [VARIED[0], (candidate(64), replace(VARIED[1][1], metrics={**VARIED[1][1].metrics, "latency": 0.2}))]
    data = DataWindow.of(members, varies=True, round_s=60.0)
    counted = []
    for one, batch in ((members[0][0], 32), (members[1][0], 128)):
        window = data.in_round(plan(one), 42, 0).window
        counted.append(((window.start_step - 1) * batch, window.end_step * batch, window.max_steps * batch))
    assert counted[0] == counted[1]


def test_a_slow_contender_has_the_time_for_its_window() -> None:
    slow, fast = (candidate(2, 8), reading([4.0] * 5, 32, 0.5)), (candidate(16), reading([0.2] * 5, 32, 0.5))
    data = DataWindow.of([slow, fast], varies=True, round_s=450.0)
    assert data.in_round(plan(slow[0]), 42, 0).deadline_s > 4.0 * data.samples / 32


def test_a_stream_begins_after_whole_steps() -> None:
    data = DataWindow.of(STEADY, varies=False, round_s=60.0)
    offsets = {data.in_round(plan(one), 42, number).stream_offset for one, _ in STEADY for number in range(8)}
    assert len(offsets) > 4
    assert all(offset % 16 == 0 for offset in offsets)


def test_batches_without_a_small_common_multiple_cost_no_more_than_a_round_may() -> None:
    sizes = (53, 59, 61)
    members = [(candidate(size), reading([size / 1000] * 5, 2 * size, 0.5)) for size in sizes]
    assert DataWindow.of(members, varies=True, round_s=20.0).samples < 10_000


def plan(one: Candidate) -> TrialPlan:
    """Of which only what concerns the data matters."""
    needless = {each.name: None for each in fields(TrialPlan) if each.default is MISSING is each.default_factory}
    return TrialPlan(**{**needless, "candidate": one, "window": StepWindow(), "deadline_s": 100.0})  # type: ignore[arg-type]


def test_the_answer_says_where_the_data_come_from() -> None:
    moved = reading([0.1] * 20, 32, data_offset=300, data_places=1000)
    assert DataWindow().note([moved]) == "Each round trained on other samples of the data."
    assert "counted the same 640 samples" in DataWindow(samples=640).note([moved])
    stays = replace(moved, data_offset=None)
    assert DataWindow().note([moved, stays]).endswith("The gain holds for its first 640 samples.")
    stream = replace(moved, data_places=None)
    assert "the first 300 that a rank reads of a stream" in DataWindow().note([stream])
    # So few that no step of it is trained on in the time that reading them may take.
    assert "could not be moved" in DataWindow().note([replace(stream, data_offset=0)])
    assert DataWindow().note([]) == ""
