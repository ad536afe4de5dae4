"""The bytes of the rows' foreseen runs, in one file beside this module, and the runs that it lacks.

A run of all layers takes minutes, so a model of many layers is run with few, twice (`pieces_of`). Rows that differ in
the number of ranks alone share the run of the fewest, and their states are divided anew, as in a plan.
`python -m benchmarks.foresee.public_gpus.row_bytes [--rows FILE]` runs what is missing. It takes an hour for all.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.foresee.public_gpus.foreseen_rows import foreseen, is_known, pieces_of
from benchmarks.foresee.public_gpus.fsdp import adjusted
from benchmarks.foresee.public_gpus.model_of_row import ROWS, RowProgram, is_decided, lacks, program_of, read_rows
from benchmarks.foresee.public_gpus.row_device import allocator, capability, room
from trial_lib.foresee.memory.constants import workspaces
from trial_lib.foresee.memory.live_bytes import live_bytes
from trial_lib.foresee.memory.replay import least_reserved, replay
from trial_lib.foresee.plan.arm_runs import divided_anew
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, ForeseenRun

STORE = Path(__file__).with_name("row_bytes.json")


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


def of_layers(pieces: Sequence[RowBytes], layers: int) -> RowBytes:
    """Returns the bytes with all layers, the peak of each moment on the line through two runs."""
    if len(pieces) == 1:
        return pieces[0]
    few, more = pieces
    times = (layers - few.layers) / (more.layers - few.layers)

    def line(one: float, other: float) -> float:
        return max(0.0, one + times * (other - one))

    peaks = {name: line(size, more.peaks[name]) for name, size in few.peaks.items()}
    kinds = {
        name: [line(*pair) for pair in zip(sizes, more.kinds[name], strict=True)] for name, sizes in few.kinds.items()
    }
    # What the allocator adds is no line in the layers. It is taken as the same share.
    scale = max(peaks.values()) / more.peak
    return RowBytes(
        layers=layers,
        peaks=peaks,
        kinds=kinds,
        allocated=scale * more.allocated,
        reserved=scale * more.reserved,
        least=scale * more.least,
    )


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
def stored() -> dict[int, dict[str, Any]]:
    """Returns what the file has of each row, by its number."""
    if not STORE.exists():
        return {}
    return {int(number): found for number, found in json.loads(STORE.read_text()).items()}


def known(row: Mapping[str, Any]) -> RowBytes | str | None:
    """Returns the bytes of a row by the file, or why there are none; None if the file has not the row's program."""
    found = stored().get(row["id"])
    program = whole_program_of(row)
    if found is None or found["program"] != program.key:
        return None
    if found["stopped"]:
        return str(found["stopped"])
    return of_layers([RowBytes(**each) for each in found["pieces"]], program.layers)


def add(rows: Iterable[Mapping[str, Any]], may_run: Callable[[], bool]) -> None:
    """Adds rows to the file.

    Args:
        rows: measurements.
        may_run: whether a run that the cache lacks may begin.
    """
    wanted = [row for row in rows if not lacks(row)]
    programs = [whole_program_of(row) for row in wanted]
    smallest = of_fewest_ranks(programs)
    kept = dict(stored())
    for row, program in zip(wanted, programs, strict=True):
        pieces = to_run(row, smallest)
        if known(row) is not None or not (all(map(is_known, pieces)) or may_run()):
            continue
        runs = [foreseen(each) for each in pieces]
        stopped = next((run.stopped for run in runs if run.stopped), "")
        found = [] if stopped else _found(row, program, pieces, runs)
        kept[row["id"]] = {"program": program.key, "stopped": stopped[:160], "pieces": found}
        print(row["id"], [each.layers for each in pieces], stopped[:80], flush=True)
    lines = (f'"{number}": {json.dumps(kept[number])}' for number in sorted(kept))
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
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
    add(read_rows(chosen.rows), lambda: not chosen.cached)


if __name__ == "__main__":
    main()
