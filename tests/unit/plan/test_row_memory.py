"""The comparison of foreseen runs with public measurements."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.foresee.public_gpus import fsdp, memory, row_bytes
from benchmarks.foresee.public_gpus.model_of_row import is_decided, program_of, read_rows
from benchmarks.foresee.public_gpus.row_bytes import (
    RowBytes,
    bytes_of,
    is_at_the_edge,
    of_fewest_ranks,
    of_layers,
    to_run,
)
from benchmarks.foresee.public_gpus.row_device import capacity, room
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, ForeseenRun, MemoryEvent, Moment, Storage
from zerotune.trial_lib.plan.device_memory import live_bytes
from zerotune.trial_lib.plan.fits import GIB

ROWS = {row["id"]: row for row in read_rows()}


def run_of(*sizes_gib: float, world: int = 8, kind: str = "parameter") -> ForeseenRun:
    storages = tuple(Storage(int(size * GIB), KINDS.index(kind), 0) for size in sizes_gib)
    events = tuple(MemoryEvent(index, 1) for index in range(len(storages)))
    return ForeseenRun(
        world=world,
        replicas=world,
        parameters=2**30,
        trainable=2**30,
        storages=storages,
        events=events,
        moments=(Moment(MOMENTS.index("backward"), 1, 0, 0, 0),),
    )


def compared(number: int, run: ForeseenRun, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    row = ROWS[number]
    found = bytes_of(row, program_of(row), run, program_of(row).layers)
    monkeypatch.setattr(row_bytes, "known", lambda row, store: found)
    return memory.compare(row)


def test_a_rows_device_has_what_torch_sees_of_it() -> None:
    assert capacity(ROWS[467]) == 31.72 * GIB
    assert capacity(ROWS[9]) == pytest.approx(79.1 * GIB)
    assert capacity({"gpu_kind": "a kind of tomorrow", "gpu_memory_gib": 100}) == pytest.approx(98.5 * GIB)


def test_an_allocated_row_is_compared_with_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(494, run_of(12.8), monkeypatch)
    assert found["memory_kind"] == "allocated"
    assert abs(found["error"]) < 0.01
    assert found["within"]
    assert found["right"]


def test_a_run_that_failed_is_compared_with_what_was_in_use_then(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(467, run_of(20, 8, 7, 30), monkeypatch)
    # The third block finds no room on a device of 31.7 GiB.
    assert found["foreseen_gib"] == pytest.approx(28, abs=0.1)
    assert (found["fitted"], found["right"]) == (False, True)


def test_no_more_is_shown_than_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(293, run_of(60), monkeypatch)
    assert found["shown_gib"] > 60
    assert found["foreseen_gib"] == pytest.approx(capacity(ROWS[293]) / GIB, abs=0.01)


def test_a_run_of_older_code_is_not_compared(tmp_path: Path) -> None:
    row = ROWS[494]
    store = tmp_path / "bytes.json"
    found = bytes_of(row, program_of(row), run_of(12.8), program_of(row).layers)
    kept = {"program": row_bytes.whole_program_of(row).key, "code": "then", "stopped": "", "pieces": [asdict(found)]}
    store.write_text(json.dumps({str(row["id"]): kept}))
    assert "error" in memory.compare(row, store, "then")
    assert memory.compare(row, store, "now")["left_out"] == "foreseen by older code"
    assert memory.results_of([row], store, "now")["summary"]["left_out"] == {"foreseen by older code": 1}


def test_fsdp_has_no_second_copy_of_16_bit_parameters() -> None:
    row = ROWS[791]
    # One copy is 2 bytes of 2**30 parameters, divided by 2 ranks.
    run = run_of(1, 1, 1, world=2, kind="optimizer")
    assert live_bytes(fsdp.adjusted(row, program_of(row), run)).peak == 2 * GIB
    assert fsdp.adjusted(ROWS[494], program_of(ROWS[494]), run) is run


def test_fsdp_keeps_its_root_gathered_during_both_passes() -> None:
    row = {**ROWS[9], "id": 9}
    program = program_of(row)
    matrix = 2 * program.vocab * program.hidden
    gathered, other = Storage(matrix, KINDS.index("buffer"), 0), Storage(GIB, KINDS.index("activation"), 0)
    run = replace(
        run_of(),
        storages=(gathered, other),
        events=tuple(MemoryEvent(*each) for each in ((0, 1), (0, 0), (1, 1), (1, 0))),
        moments=(Moment(MOMENTS.index("forward"), 1, 0, 0, 0), Moment(MOMENTS.index("backward"), 1, 0, 2, 0)),
    )
    assert live_bytes(run).peak == GIB
    found = live_bytes(fsdp.adjusted(row, program, run))
    assert [each.peak for each in found.moments] == [matrix, GIB + matrix]
    assert found.moments[-1].at_end == 0
    # torchtitan wraps embedding and output layer apart.
    assert live_bytes(fsdp.adjusted({**row, "framework": "torchtitan FSDP2"}, program, run)).peak == GIB


def test_without_synchronisation_all_gradients_are_on_each_rank() -> None:
    row, backward = ROWS[792], MOMENTS.index("backward")
    program = program_of(row)
    two = tuple(Moment(backward, 1, number, number, 0) for number in (0, 1))
    run = replace(run_of(1, 1, world=2), moments=two)
    # All but this rank's share of 2 GiB is added between the ends of the two passes.
    assert live_bytes(fsdp.adjusted(row, program, run)).peak == 2 * GIB + GIB
    assert live_bytes(fsdp.adjusted({**row, "grad_accum": 1}, program, run)).peak == 2 * GIB


def test_a_default_decides_only_if_the_source_and_its_documents_say_so() -> None:
    # torchtitan's default is documented. Rows of issue 3901 say nothing.
    assert is_decided(ROWS[696])
    assert not is_decided(ROWS[885])
    # "selective" alone.
    assert not is_decided(ROWS[702])
    assert program_of(ROWS[696]).checkpoints_by_operation


def test_an_undecided_row_fits_with_the_share_that_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    row, decided = ROWS[888], ROWS[696]
    assert not row_bytes.recomputing(decided)
    assert row_bytes.recomputing(row)["activation_checkpointing"] is True
    assert not row_bytes.recomputing({**row, "activation_checkpointing": True})

    def of(gib: float) -> RowBytes:
        return bytes_of(row, program_of(row), run_of(gib), program_of(row).layers)

    sizes = {"888": of(60), "888 recomputing": of(20)}
    monkeypatch.setattr(row_bytes, "known", lambda row, store: sizes.get(str(row["id"])))
    found = memory.compare(row)
    assert found["fits"] == pytest.approx(memory.RECOMPUTES, abs=0.01)
    assert found["right"]
    # Peaks are compared without recomputation, as the README says.
    assert found["allocated_gib"] > 60
    del sizes["888 recomputing"]
    assert memory.compare(row)["fits"] == pytest.approx(0.0, abs=0.01)


def test_more_layers_follow_from_few() -> None:
    few = RowBytes(
        layers=4,
        peaks={"backward": 9.0, "update": 6.0},
        kinds={"backward": [9.0], "update": [6.0]},
        allocated=9.0,
        reserved=12.0,
        least=10.0,
    )
    more = replace(few, layers=8, peaks={"backward": 10.0, "update": 9.0}, kinds={"backward": [10.0], "update": [9.0]})
    program = replace(program_of(ROWS[929]), layers=16)
    found = of_layers((few, replace(more, allocated=11.0, reserved=15.0, least=12.0)), program)
    # The update grows faster, so it has the peak in the end. What the allocator adds grows by no more than the peak.
    assert found.peak == found.peaks["update"] == 15.0
    assert (found.allocated, found.reserved, found.least) == (16.5, 22.5, 18.0)
    # It does not shrink.
    steady = of_layers((few, replace(more, allocated=10.0, reserved=12.0, least=10.5)), program)
    assert (steady.allocated, steady.reserved, steady.least) == (15.0, 17.0, 15.5)


def test_an_update_of_stage_3_has_temporaries_of_one_sub_group() -> None:
    program = program_of(ROWS[771])
    of_rank = replace(program, layers=8).parameters / program.world
    kinds = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    kinds[KINDS.index("temporary")] = 4.0
    few = RowBytes(
        layers=4,
        peaks={"update": 3.0},
        kinds={"update": [each / 2 for each in kinds]},
        allocated=3.0,
        reserved=3.0,
        least=3.0,
    )
    more = replace(few, layers=8, peaks={"update": 6.0}, kinds={"update": kinds}, allocated=6.0)
    found = of_layers((few, more), program)
    # The rank of 60 layers has more parameters than a sub-group of 1e9.
    assert program.parameters / program.world > 1e9
    temporary = found.kinds["update"][KINDS.index("temporary")]
    assert temporary == pytest.approx(4.0 * 1e9 / of_rank)
    assert found.peak == pytest.approx(2 * 60 / 8 + temporary)


def test_few_layers_are_more_than_stage_3_keeps_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_bytes, "is_known", lambda program: False)
    assert [each.layers for each in to_run(ROWS[929], {})] == [4, 8]
    few = to_run(ROWS[638], {})[0]
    assert few.layers * few.layer_parameters > 1e9
    # A failure is no line in the layers.
    assert [each.layers for each in to_run(ROWS[467], {})] == [48]


def test_a_row_at_the_edge_is_run_with_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS[288]
    has = room(row, program_of(row))
    for allocated, least, expected in ((0.7, 0.8, False), (0.7, 0.9, True), (1.1, 1.5, True), (1.2, 1.5, False)):
        found = RowBytes(layers=64, peaks={}, kinds={}, allocated=allocated * has, reserved=0.0, least=least * has)
        monkeypatch.setattr(row_bytes, "known", lambda row, store, found=found: found)
        assert is_at_the_edge(row) is expected


def test_a_device_without_room_for_two_copies_counts() -> None:
    """Stages 1 and 2 flatten parameters on the device if it has room for both copies."""
    assert program_of(ROWS[469]).is_narrow
    assert not program_of({**ROWS[469], "gpu_memory_gib": 80}).is_narrow
    assert not program_of({**ROWS[469], "zero_stage": 3}).is_narrow


def test_a_run_of_the_fewest_ranks_stands_for_rows_of_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_bytes, "is_known", lambda program: False)
    of_512, of_8 = program_of(ROWS[9]), program_of(ROWS[11])
    smallest = of_fewest_ranks([of_512, of_8])
    assert to_run(ROWS[9], smallest)[0].world == min(of_512.world, of_8.world) < of_512.world


def test_the_file_has_the_programs_of_its_rows() -> None:
    known = [row for row in ROWS.values() if str(row["id"]) in row_bytes.stored()]
    assert len(known) >= 60
    assert all(row_bytes.known(row) is not None for row in known)


def test_the_summary_counts_what_it_shows() -> None:
    rows = [
        {"memory_kind": "allocated", "error": -0.1, "within": True, "decided": True, "right": True, "fitted": True},
        {
            "memory_kind": "allocated at failure",
            "error": 0.3,
            "within": False,
            "decided": False,
            "right": False,
            "fitted": False,
        },
        {"left_out": "not foreseen: a reason"},
    ]
    found = memory.summary(rows)
    assert found["allocated"] == {"rows": 2, "median_error": 0.2, "worst_error": 0.3, "within_90": 0.5}
    assert found["allocated, decided"]["rows"] == 1
    assert found["does not fit"] == {"rows": 1, "right": 0}
    assert found["left_out"] == {"not foreseen": 1}
