"""The memory of one optimizer step over its events."""

from dataclasses import replace

import pytest
from plan_fixtures import GIB, LAYERS, MIB, HandMadeRun, run_by_hand

from zerotune.trial_lib.plan.device_memory import live_bytes
from zerotune.trial_lib.report.plan_figures import HOST, StepLine, StepPart, places, step_line


def test_the_peak_is_that_of_the_step_with_all_states() -> None:
    run = run_by_hand()
    line = step_line(run)
    assert line is not None
    assert line.most == live_bytes(run).peak
    assert line.peak_part.name == "backward"
    at_peak = dict(zip(line.kinds, line.bytes[line.peak], strict=True))
    assert at_peak["optimizer"] == LAYERS * 360 * MIB
    assert at_peak["activation"] == 4 * (LAYERS * 256 + 500) * MIB


def test_the_moments_follow_each_other_without_a_gap_and_the_line_ends_with_them() -> None:
    line = step_line(run_by_hand())
    assert line is not None
    assert [part.name for part in line.parts] == ["between", "load", "forward", "backward", "update"]
    assert [part.start for part in line.parts] == [0, *(part.end for part in line.parts[:-1])]
    assert line.events[0] == 0
    assert line.events[-1] == line.parts[-1].end
    assert list(line.events) == sorted(line.events)


def test_it_begins_with_what_was_alive_before() -> None:
    line = step_line(run_by_hand())
    assert line is not None
    assert sum(line.bytes[0]) == (LAYERS * (60 + 360) + 500) * MIB


def test_of_many_micro_batches_the_first_and_the_last_are_left() -> None:
    line = step_line(run_by_hand(accumulation=16))
    assert line is not None
    assert line.skipped == 14
    assert {part.micro_batch for part in line.parts} == {0, 15}
    whole = step_line(run_by_hand(accumulation=2))
    assert whole is not None
    assert whole.skipped == 0
    assert line.most == whole.most


def test_of_a_pipeline_whose_micro_batches_interleave_none_is_left_out() -> None:
    run = replace(run_by_hand(accumulation=16), is_pipeline=True, pipeline_stages=15)
    line = step_line(run)
    assert line is not None
    assert line.skipped == 0
    assert {part.micro_batch for part in line.parts} == set(range(16))


def test_a_long_run_is_thinned_and_keeps_its_peak() -> None:
    run = run_by_hand(accumulation=2)
    line = step_line(run)
    assert line is not None
    assert line.parts[-1].end > 1500
    assert len(line.events) < 900
    assert line.most == live_bytes(run).peak


def test_the_host_has_a_line_of_its_own_if_states_lie_there() -> None:
    run = run_by_hand(offload=True)
    on_device, on_host = step_line(run), step_line(run, HOST)
    assert on_device is not None
    assert on_host is not None
    assert "optimizer" not in on_device.kinds
    assert on_host.peak_part.name == "update"
    assert on_host.most == live_bytes(run_by_hand(offload=True), "pinned").peak
    assert on_host.most > (LAYERS * (360 + 60) + 600) * MIB
    assert step_line(run_by_hand(), HOST) is None


def test_a_run_without_an_update_has_no_step() -> None:
    made = HandMadeRun()
    made.moment("forward", 1)
    made.make(GIB, "activation")
    assert step_line(made.run()) is None


@pytest.mark.parametrize("events", [(3, 2000, 4000, 8), (1, 1, 1, 1), (1, 5, 100_000, 2)])
def test_each_moment_has_room_for_its_name_and_the_order_stays(events: tuple[int, ...]) -> None:
    names = ("load", "forward", "backward", "update")
    ends = [sum(events[: index + 1]) for index in range(4)]
    parts = tuple(
        StepPart(name=name, micro_batch=0, start=end - count, end=end)
        for name, count, end in zip(names, events, ends, strict=True)
    )
    line = StepLine(samples=1, kinds=(), events=(), bytes=(), parts=parts, peak=0)
    place = places(line)
    starts = [place(part.start) for part in parts]
    widths = [after - start for start, after in zip(starts, [*starts[1:], 1.0], strict=True)]
    assert min(widths) >= 0.07
    at = [place(event) for event in range(0, ends[-1] + 1, max(ends[-1] // 300, 1))]
    assert at == sorted(at)
    assert (place(0), place(ends[-1])) == (0.0, pytest.approx(1.0))
