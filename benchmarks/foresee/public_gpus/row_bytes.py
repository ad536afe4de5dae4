"""The bytes of the rows' foreseen runs, in one file beside this module, and the runs that it lacks.

A run of all layers takes minutes, so a model of many layers is run with few, twice (`pieces_of`). Rows that differ in
the number of ranks alone share the run of the fewest, and their states are divided anew, as in a plan.
`python -m benchmarks.foresee.public_gpus.row_bytes [--rows FILE]` runs what is missing. It takes an hour for all.
"""

import argparse
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.foresee.public_gpus.foreseen_rows import code, foreseen, is_known, pieces_of, store_of
from benchmarks.foresee.public_gpus.fsdp import adjusted
from benchmarks.foresee.public_gpus.model_of_row import ROWS, RowProgram, is_decided, lacks, program_of, read_rows
from benchmarks.foresee.public_gpus.row_device import allocator, capability, room
from benchmarks.foresee.public_gpus.sound_rows import MISTAKES
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, ForeseenRun
from zerotune.trial_lib.plan.device_memory import least_reserved, live_bytes, replay
from zerotune.trial_lib.plan.fits import workspaces
from zerotune.trial_lib.plan.scaling import divided_anew

_UPDATE, _TEMPORARY = "update", KINDS.index("temporary")
# The default of `sub_group_size` (deepspeed/runtime/zero/config.py, 0.19.8).
_SUB_GROUP = 1e9
_BY_MEMORY = {"fit", "no_fit", "peak_memory"}
STORE, GRID_STORE = (Path(__file__).with_name(name) for name in ("row_bytes.json", "grid_bytes.json"))
EDGE = 0.15
"""How near to the memory of its device a row is run with all layers."""


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """The bytes of a row's program with some layers.

    Attributes:
        layers: of the run.
        peaks: the highest live bytes of each name of a moment.
        kinds: the same by kind, in the order of `KINDS`.
        allocated: the most that the caching allocator has in use, with the workspaces of cuBLAS.
        reserved: the most that it reserves on a device that never gets full.
        least: about the least that a device has to have for it.
        at_failure: the most in use on the row's device, if the run fails there; None if it was not asked.
    """

    layers: int
    peaks: Mapping[str, float]
    kinds: Mapping[str, Sequence[float]]
    allocated: float
    reserved: float
    least: float
    at_failure: float | None = None

    @property
    def peak(self) -> float:
        """The highest live bytes."""
        return max(self.peaks.values())


def of_layers(pieces: Sequence[RowBytes], program: RowProgram) -> RowBytes:
    """Returns the bytes with all layers, the peak of each moment on the line through two runs.

    An update of stage 3 is no line: it goes through the rank's parameters by sub-groups, and its temporaries are those
    of one (`_optimizer_step` of deepspeed/runtime/zero/stage3.py, 0.19.8).
    """
    if len(pieces) == 1:
        return pieces[0]
    few, more = pieces
    times = (program.layers - few.layers) / (more.layers - few.layers)

    def line(one: float, other: float) -> float:
        return max(0.0, one + times * (other - one))

    peaks = {name: line(size, more.peaks[name]) for name, size in few.peaks.items()}
    kinds = {
        name: [line(*pair) for pair in zip(sizes, more.kinds[name], strict=True)] for name, sizes in few.kinds.items()
    }
    if _UPDATE in peaks and program.ds_config["zero_optimization"]["stage"] == 3:
        temporary = (
            more.kinds[_UPDATE][_TEMPORARY] * _sub_group(program, program.layers) / _sub_group(program, more.layers)
        )
        spared = max(0.0, kinds[_UPDATE][_TEMPORARY] - temporary)
        peaks[_UPDATE] -= spared
        kinds[_UPDATE][_TEMPORARY] -= spared
    highest = max(peaks.values())

    def with_allocator(name: str) -> float:
        # What the allocator adds does not shrink with more layers, and it grows by no more than the peak does.
        added, grown = (getattr(each, name) - each.peak for each in (few, more))
        return highest + min(max(grown, line(added, grown)), grown * max(1.0, highest / more.peak))

    return RowBytes(
        layers=program.layers,
        peaks=peaks,
        kinds=kinds,
        allocated=with_allocator("allocated"),
        reserved=with_allocator("reserved"),
        least=with_allocator("least"),
    )


def _sub_group(program: RowProgram, layers: int) -> float:
    """Returns the parameters of a rank that an update has temporaries for at once, with some of the layers."""
    of_rank = replace(program, layers=layers).parameters / program.world
    return min(of_rank, float(program.ds_config["zero_optimization"].get("sub_group_size", _SUB_GROUP)))


def whole_program_of(row: Mapping[str, Any]) -> RowProgram:
    """Returns the program of a row. A rank has its part of each sequence, and the exchanges of Ulysses are left out."""
    return replace(program_of(row), divided=1)


def bytes_of(row: Mapping[str, Any], program: RowProgram, run: ForeseenRun, layers: int) -> RowBytes:
    """Returns the bytes of a row's run.

    Args:
        row: the measurement.
        program: of the row.
        run: of the program, or of one with fewer layers.
        layers: of the run.
    """
    run = adjusted(row, program, run)
    before, settings = workspaces(capability(row)), allocator(row)
    found = replay(run, settings, before=before)
    live = live_bytes(run)
    highest = {name: moment for name in MOMENTS if (moment := live.highest_of(name))}
    failed = None
    if row.get("memory_kind") == "allocated at failure":
        failed = replay(run, settings, room(row, program), before).allocated
    return RowBytes(
        layers=layers,
        peaks={name: moment.peak for name, moment in highest.items()},
        kinds={name: moment.by_kind for name, moment in highest.items()},
        allocated=found.allocated,
        reserved=found.reserved,
        least=least_reserved(run, found, settings, before),
        at_failure=failed,
    )


def of_fewest_ranks(programs: Iterable[RowProgram]) -> dict[str, RowProgram]:
    """Returns the program of the fewest ranks, but more than one, of each sort."""
    found: dict[str, RowProgram] = {}
    for program in programs:
        sort = _sort(program)
        if program.world > 1 and (sort not in found or program.world < found[sort].world):
            found[sort] = program
    return found


def to_run(row: Mapping[str, Any], smallest: Mapping[str, RowProgram]) -> tuple[RowProgram, ...]:
    """Returns the programs that are run for a row: its own if the cache has it, or if few layers would not do.

    Args:
        row: the measurement.
        smallest: by `of_fewest_ranks`. They stand for rows of more ranks.
    """
    own = whole_program_of(row)
    kind = row.get("memory_kind")
    is_no_line = kind == "allocated at failure" or (kind in ("reserved", "shown") and is_decided(row))
    # Neither a failure nor what is reserved is a line in the layers.
    if is_no_line or is_known(own):
        return (own,)
    return pieces_of(smallest.get(_sort(own), own) if own.world > 1 else own)


def _sort(program: RowProgram) -> str:
    return replace(program, world=1, per_node=1).key


@lru_cache
def stored(store: Path = STORE) -> dict[str, dict[str, Any]]:
    """Returns what a file has of each row, by its `id`."""
    return json.loads(store.read_text()) if store.exists() else {}


def known(row: Mapping[str, Any], store: Path = STORE) -> RowBytes | str | None:
    """Returns the bytes of a row by a file, or why there are none; None if the file has not the row's program."""
    found = stored(store).get(str(row["id"]))
    program = whole_program_of(row)
    if found is None or found["program"] != program.key:
        return None
    if found["stopped"]:
        return str(found["stopped"])
    return of_layers([RowBytes(**each) for each in found["pieces"]], program)


def is_of(mark: str, row: Mapping[str, Any], store: Path = STORE) -> bool:
    """Returns whether a file has a row's run by the code with a mark."""
    return known(row, store) is not None and stored(store)[str(row["id"])].get("code") == mark


def is_current(row: Mapping[str, Any], store: Path = STORE) -> bool:
    """Returns whether a file has a row's run by the code that foresees today."""
    return is_of(code(), row, store)


def add(rows: Iterable[Mapping[str, Any]], may_run: Callable[[], bool], store: Path = STORE) -> None:
    """Adds rows to a file.

    Args:
        rows: measurements.
        may_run: whether a run that the cache lacks may begin.
        store: the file.
    """
    wanted = [row for row in rows if not lacks(row)]
    smallest = of_fewest_ranks(whole_program_of(row) for row in wanted)
    for row in wanted:
        if not is_current(row, store):
            _add(row, to_run(row, smallest), may_run, store)
    for row in wanted:
        found = stored(store).get(str(row["id"]))
        if found and len(found["pieces"]) > 1 and not found.get("whole") and is_at_the_edge(row, store):
            _add(row, (whole_program_of(row),), may_run, store)
    for row in wanted:
        other = recomputing(row)
        if other and not is_current(other, store) and (row.get("peak_memory_gib") or has_no_room(row, store)):
            _add(other, to_run(other, of_fewest_ranks([whole_program_of(other)])), may_run, store)


def recomputing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row as if all its layers recomputed; empty if the source decides that, or says that they do."""
    if is_decided(row) or row.get("activation_checkpointing") is True or not _BY_MEMORY & set(row["use_for"]):
        return {}
    return {**row, "id": f"{row['id']} recomputing", "activation_checkpointing": True}


def has_no_room(row: Mapping[str, Any], store: Path = STORE) -> bool:
    """Returns whether a row is foreseen to need more than its device has."""
    found = known(row, store)
    return isinstance(found, RowBytes) and found.least > room(row, program_of(row))


def is_at_the_edge(row: Mapping[str, Any], store: Path = STORE) -> bool:
    """Returns whether two runs with few layers do not decide if a row's device suffices.

    What the allocator adds is their least sure part. So the device's memory lies between what is in use and what is
    needed, or near to one of both.
    """
    found = known(row, store)
    if not isinstance(found, RowBytes):
        return False
    has = room(row, program_of(row))
    return found.allocated < has * (1 + EDGE) and found.least > has * (1 - EDGE)


def _add(row: Mapping[str, Any], pieces: Sequence[RowProgram], may_run: Callable[[], bool], store: Path) -> None:
    if not (all(map(is_known, pieces)) or may_run()):
        return
    kept, name, program = dict(stored(store)), str(row["id"]), whole_program_of(row)
    runs = [foreseen(each) for each in pieces]
    stopped, found = next((run.stopped for run in runs if run.stopped), ""), []
    try:
        found = [] if stopped else _found(row, program, pieces, runs)
    except MISTAKES as error:
        # One row must not take the others with it.
        traceback.print_exc()
        stopped = f"{type(error).__name__}: {error}"
    before = kept.get(name)
    if stopped and before and before["program"] == program.key and is_current(row, store) and before["pieces"]:
        # What few layers gave stays.
        kept[name] = {**before, "whole": stopped[:160]}
    else:
        kept[name] = {"program": program.key, "code": code(), "stopped": stopped[:160], "pieces": found}
    # A call that is interrupted keeps what it has.
    _write(kept, store)
    print(row["id"], [each.layers for each in pieces], stopped[:80], flush=True)


def _write(kept: Mapping[str, Mapping[str, Any]], store: Path) -> None:
    ordered = sorted(kept, key=lambda name: (len(name), name))
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in ordered)
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    stored.cache_clear()


def _found(
    row: Mapping[str, Any], program: RowProgram, pieces: Sequence[RowProgram], runs: Sequence[ForeseenRun]
) -> list[dict[str, Any]]:
    found = []
    for piece, run in zip(pieces, runs, strict=True):
        replicas = run.replicas * program.world // run.world
        whole = run if replicas == run.replicas else divided_anew(run, replicas)
        found.append(_plain(bytes_of(row, program, whole, piece.layers)))
    return found


def _plain(found: RowBytes) -> dict[str, Any]:
    plain = asdict(found)
    plain["peaks"] = {name: round(size) for name, size in found.peaks.items()}
    plain["kinds"] = {name: [round(size) for size in sizes] for name, sizes in found.kinds.items()}
    return {name: round(value) if isinstance(value, float) else value for name, value in plain.items()}


def split_of(found: RowBytes) -> tuple[str, dict[str, float]]:
    """Returns the name of the moment with the peak, and its bytes by kind."""
    name = max(found.peaks, key=lambda each: found.peaks[each])
    return name, dict(zip(KINDS, found.kinds[name], strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--cached", action="store_true", help="only rows whose runs the cache has")
    chosen = parser.parse_args(arguments)
    add(read_rows(chosen.rows), lambda: not chosen.cached, store_of(chosen.rows, STORE))


if __name__ == "__main__":
    main()
