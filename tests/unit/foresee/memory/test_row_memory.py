"""The comparison of foreseen runs with public measurements."""

from typing import Any

import pytest

from benchmarks.foresee.public_gpus import memory
from benchmarks.foresee.public_gpus.model_of_row import program_of, read_rows
from trial_lib.foresee.memory.constants import GIB
from trial_lib.foresee.memory.live_bytes import live_bytes
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, ForeseenRun, MemoryEvent, Moment, Storage

ROWS = {row["id"]: row for row in read_rows()}


def run_of(*sizes_gib: float, world: int = 8, kind: str = "parameter") -> ForeseenRun:
    storages = tuple(Storage(int(size * GIB), KINDS.index(kind), 0) for size in sizes_gib)
    events = tuple(MemoryEvent(index, 1) for index in range(len(storages)))
    return ForeseenRun(
        world=world,
        parameters=2**30,
        storages=storages,
        events=events,
        moments=(Moment(MOMENTS.index("backward"), 1, 0, 0, 0),),
    )


def compared(row: dict[str, Any], run: ForeseenRun, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(memory, "foreseen", lambda program: run)
    monkeypatch.setattr(memory, "is_known", lambda program: True)
    return memory.compare(row, runs=False)


def test_a_rows_device_has_what_torch_sees_of_it() -> None:
    assert memory.capacity(ROWS[467]) == 31.72 * GIB
    assert memory.capacity(ROWS[9]) == pytest.approx(79.1 * GIB)
    assert memory.capacity({"gpu_kind": "a kind of tomorrow", "gpu_memory_gib": 100}) == pytest.approx(98.5 * GIB)


def test_an_allocated_row_is_compared_with_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(ROWS[494], run_of(12.8), monkeypatch)
    assert found["memory_kind"] == "allocated"
    assert abs(found["error"]) < 0.01
    assert found["within"]
    assert found["right"]


def test_a_run_that_failed_is_compared_with_what_was_in_use_then(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[467]
    found = compared(row, run_of(20, 8, 7, 30), monkeypatch)
    # The third block finds no room on a device of 31.7 GiB.
    assert found["foreseen_gib"] == pytest.approx(28, abs=0.1)
    assert (found["fitted"], found["right"]) == (False, True)


def test_fsdp_has_no_second_copy_of_16_bit_parameters() -> None:
    row = ROWS[790]
    program = program_of(row)
    # One copy is 2 bytes of 2**30 parameters, divided by 4 ranks.
    run = run_of(0.5, 0.5, 0.5, world=4, kind="optimizer")
    assert live_bytes(memory.adjusted(row, program, run)).peak == GIB
    assert memory.adjusted(ROWS[494], program_of(ROWS[494]), run) is run


def test_more_layers_follow_from_few() -> None:
    few, more = run_of(1, 8), run_of(1, 16)
    assert memory.of_more_layers((few, more), 96).peak == pytest.approx(97 * GIB)


def test_the_summary_counts_what_it_shows() -> None:
    rows = [
        {"memory_kind": "allocated", "error": -0.1, "within": True, "stated": True, "right": True, "fitted": True},
        {
            "memory_kind": "allocated at failure",
            "error": 0.3,
            "within": False,
            "stated": False,
            "right": False,
            "fitted": False,
        },
        {"left_out": "not foreseen: a reason"},
    ]
    found = memory.summary(rows)
    assert found["allocated"] == {"rows": 2, "median_error": 0.2, "worst_error": 0.3, "within_90": 0.5}
    assert found["allocated, checkpointing stated"]["rows"] == 1
    assert found["does not fit"] == {"rows": 1, "right": 0}
    assert found["left_out"] == {"not foreseen": 1}
