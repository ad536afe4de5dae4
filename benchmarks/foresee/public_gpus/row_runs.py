"""The steps of the rows' foreseen runs, in one file beside this module, and the runs that it lacks.

A run of all layers takes a minute, so a model of many layers is run with few. The layers between are alike.
`python -m benchmarks.foresee.public_gpus.row_runs [--rows FILE]` runs what is missing. It takes an hour for all.
"""

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.foresee.public_gpus.foreseen_rows import code, foreseen, is_known, sized, store_of
from benchmarks.foresee.public_gpus.model_of_row import ROWS, RowProgram, read_rows
from benchmarks.foresee.public_gpus.more_layers import with_layers
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.scaling import at_size, at_world
from zerotune.trial_lib.plan.step_time import step_of

STORE = Path(__file__).with_name("row_runs.json.xz")
_FEW = 4
# What stage 3 keeps gathered, and so does not gather for the backward pass (deepspeed/runtime/zero/config.py, 0.19.8).
_KEPT = "stage3_max_live_parameters", "stage3_max_reuse_distance"
_KEPT_BY_DEFAULT = 1e9
_MOST_OF_ALL = 0.7
_FIELDS = ("world", "replicas", "micro_batch", "accumulation", "tokens", "parameters", "trainable", "stage", "formats")


def run_of(program: RowProgram, store: Path = STORE) -> ForeseenRun | None:
    """Returns the last step of a program's foreseen run.

    Args:
        program: of a row.
        store: a file of runs, which counts besides the committed one.

    Returns:
        The step; None if there is no run of its kind.
    """
    kind = kind_of_program(program)
    runs = {run.micro_batch: run for run in _of_all_layers(kind, program.layers, _of_layer(program), store)}
    if not runs:
        return None
    if program.micro_batch in runs:
        run = runs[program.micro_batch]
    elif len(runs) < 2:
        return None
    else:
        low, high = _nearest(sorted(runs), program.micro_batch)
        run = at_size(runs[low], runs[high], program.micro_batch)
    return replace(at_world(run, program.world // program.shards), tokens=program.tokens)


def _nearest(sizes: Sequence[int], wanted: int) -> tuple[int, int]:
    """Returns two neighbours among sizes, between which the wanted one is if possible."""
    above = next((index for index, size in enumerate(sizes) if size > wanted), len(sizes) - 1)
    return sizes[max(0, above - 1)], sizes[max(1, above)]


@lru_cache(maxsize=64)
def _of_all_layers(kind: str, layers: int, of_layer: float, store: Path) -> tuple[ForeseenRun, ...]:
    """Returns the runs of a kind of program, one of each micro-batch, with all layers."""
    found = []
    for pieces in _stored(store).get(kind, {}).values():
        few = max(map(int, pieces))
        found.append(with_layers(_unpacked(pieces[str(few)]), few, layers, of_layer))
    return tuple(found)


def kind_of_program(program: RowProgram) -> str:
    """Returns a name for programs that differ in micro-batch, accumulation and the number of replicas alone."""
    counts = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: value for name, value in program.ds_config.items() if name not in counts}
    several = min(2, program.world // program.shards)
    # How a loss keeps its logits changes bytes of memory. The stored runs have those of 32 bits.
    loss = "full" if program.loss in ("half", "compiled") else program.loss
    whole = replace(
        program, micro_batch=1, accumulation=1, world=several, per_node=8, loss=loss, ds_config=config, is_narrow=False
    )
    return whole.key


def few_layers(program: RowProgram) -> int:
    """Returns the number of layers that a program is run with.

    They are whole pieces of checkpointed layers. With stage 3 they have more parameters than stay gathered.
    """
    unit = program.checkpointed_layers * program.checkpoint_every
    zero = program.ds_config["zero_optimization"]
    kept = sum(zero.get(name, _KEPT_BY_DEFAULT) for name in _KEPT) if zero["stage"] == 3 else 0
    few = max(_FEW * unit, math.ceil(kept / _of_layer(program)) + 2)
    # The other layers have to be whole pieces too.
    few += (program.layers - few) % unit
    return few if few < _MOST_OF_ALL * program.layers else program.layers


def _of_layer(program: RowProgram) -> float:
    """Returns the parameters of a layer on one shard."""
    return (program.parameters - program.parameters_outside) / program.layers / program.shards


def is_older(program: RowProgram, mark: str, store: Path = STORE) -> bool:
    """Returns whether some run of a program's kind is by other code than that with a mark."""
    sizes = _stored(store).get(kind_of_program(program), {})
    return any(piece.get("code") != mark for pieces in sizes.values() for piece in pieces.values())


@lru_cache
def _stored(store: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in {STORE: None, store: None}:
        for kind, sizes in (json.loads(lzma.decompress(file.read_bytes())) if file.exists() else {}).items():
            found[kind] = {**found.get(kind, {}), **sizes}
    return found


def add(programs: Sequence[RowProgram], may_run: Callable[[], bool] = lambda: True, store: Path = STORE) -> None:
    """Runs what a file lacks: each kind of program with its smallest and its largest micro-batch.

    Args:
        programs: of rows.
        may_run: whether a run that the cache lacks may begin.
        store: the file.
    """
    kept = {kind: {size: dict(pieces) for size, pieces in sizes.items()} for kind, sizes in _stored(store).items()}
    for kind, members in _of_kinds(programs).items():
        # A size between the two is not run again, so an older run of it goes.
        kept[kind] = {
            size: pieces
            for size, pieces in kept.get(kind, {}).items()
            if int(size) in _ends(members) or all(each.get("code") == code() for each in pieces.values())
        }
    wanted = _to_run(programs, kept)
    for number, (kind, program) in enumerate(wanted, start=1):
        piece = replace(program, layers=few_layers(program))
        if not (is_known(piece) or may_run()):
            print(f"{number} of {len(wanted)}: not run", flush=True)
            continue
        began = time.monotonic()
        run = foreseen(piece)
        if not run.stopped and not _can_grow(run, piece.layers, program):
            piece, run = program, foreseen(program)
        words = f"{piece.family} {piece.layers} x {piece.hidden}, stage {piece.ds_config['zero_optimization']['stage']}"
        print(f"{number} of {len(wanted)}: {words}, {time.monotonic() - began:.0f} s {run.stopped}", flush=True)
        if not run.stopped:
            # Runs of older code go, with whatever layers.
            kept.setdefault(kind, {})[str(piece.micro_batch)] = {str(piece.layers): {**packed(run), "code": code()}}
        if number % 5 == 0:
            _write(kept, store)
    _write(kept, store)


def _can_grow(run: ForeseenRun, few: int, program: RowProgram) -> bool:
    """Returns whether the layers of a run are alike enough to add others."""
    try:
        with_layers(_unpacked(packed(run)), few, program.layers, _of_layer(program))
    except ValueError:
        return False
    return True


def _to_run(programs: Sequence[RowProgram], kept: Mapping[str, Any]) -> list[tuple[str, RowProgram]]:
    found = []
    for kind, members in _of_kinds(programs).items():
        # A run of few ranks has the same operations, and is no faster.
        one = min(members, key=lambda each: (-each.accumulation, each.world))
        for size in _ends(members):
            pieces = kept.get(kind, {}).get(str(size), {})
            if not pieces or any(each.get("code") != code() for each in pieces.values()):
                found.append((kind, sized(one if _reduces_late(one) else _once(one), size)))
    return found


def _of_kinds(programs: Sequence[RowProgram]) -> dict[str, list[RowProgram]]:
    kinds: dict[str, list[RowProgram]] = {}
    for program in programs:
        kinds.setdefault(kind_of_program(program), []).append(program)
    return kinds


def _ends(members: Sequence[RowProgram]) -> list[int]:
    sizes = [each.micro_batch for each in members]
    return sorted({min(sizes), max(sizes)})


def _reduces_late(program: RowProgram) -> bool:
    """Returns whether a step has work that only its last micro-batch has."""
    stage: int = program.ds_config["zero_optimization"]["stage"]
    return stage < 2


def _once(program: RowProgram) -> RowProgram:
    """Returns a program without accumulation."""
    return replace(program, accumulation=1, ds_config={**program.ds_config, "gradient_accumulation_steps": 1})


def _write(runs: Mapping[str, Any], store: Path) -> None:
    text = json.dumps(dict(sorted(runs.items())), separators=(",", ":"))
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_bytes(lzma.compress(text.encode(), preset=6))
    _stored.cache_clear()
    _of_all_layers.cache_clear()


def packed(run: ForeseenRun) -> dict[str, Any]:
    """Returns the last step of a run, each different operation once."""
    step = step_of(replace(run, accumulation=1_000_000))
    table: dict[Operation, int] = {}
    moments, order, where, before = [], [], 0, -1
    for stretch in step.last:
        moments.append([MOMENTS.index(stretch.moment), stretch.micro_batch, len(order)])
        for operation in stretch.operations:
            where, before = (where, before) if operation.where == before else (1 - where, operation.where)
            order.append(table.setdefault(operation._replace(where=where), len(table)))
    plain = {name: getattr(run, name) for name in (*_FIELDS, "dtypes", "ds_config")}
    return {**plain, "moments": moments, "table": [_short(each) for each in table], "order": order}


def _short(operation: Operation) -> list[float]:
    return [int(each) if float(each).is_integer() else each for each in operation]


def _unpacked(plain: Mapping[str, Any]) -> ForeseenRun:
    table = [Operation(*each) for each in plain["table"]]
    values = {name: plain[name] for name in (*_FIELDS, "ds_config")}
    return ForeseenRun(
        **{**values, "formats": tuple(plain["formats"])},
        dtypes=tuple(plain["dtypes"]),
        moments=tuple(Moment(name, 1, micro_batch, 0, start) for name, micro_batch, start in plain["moments"]),
        operations=tuple(table[index] for index in plain["order"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the programs of rows that have a speed."""
    from benchmarks.foresee.public_gpus.speed import left_out, program_for_speed

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    chosen = parser.parse_args(arguments)
    rows = [row for row in read_rows(chosen.rows) if not left_out(row)]
    add([program_for_speed(row) for row in rows], store=store_of(chosen.rows, STORE))


if __name__ == "__main__":
    main()
