"""Compares the memory of foreseen runs with public measurements: `python -m benchmarks.foresee.public_gpus.memory`.

Each row's program is foreseen once and cached (`foreseen_rows.py`), so a second comparison takes a minute.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.foresee.public_gpus.foreseen_rows import foreseen, is_known
from benchmarks.foresee.public_gpus.model_of_row import ROWS, RowProgram, lacks, program_of, read_rows
from trial_lib.foresee.memory.by_size import by_size
from trial_lib.foresee.memory.constants import GIB, outside_pytorch, workspaces
from trial_lib.foresee.memory.fits import ArmMemory, PeakForecast, interval
from trial_lib.foresee.memory.live_bytes import LiveBytes
from trial_lib.foresee.memory.replay import replay
from trial_lib.foresee.time.devices import known_devices
from trial_lib.memory.budget import Uncertain
from trial_lib.wire.foreseen_run import KINDS, ForeseenRun

RESULTS = Path(__file__).parents[2] / "results" / "foreseen_memory.json"

ROW_ERROR = 0.12
"""Standard deviation of the allocated peak, as a share, for a program that was rebuilt from a row's facts.

The one constant that is fitted to these rows: the least with which the interval holds 85 % of the allocated ones. It
decides the width of the interval, and no prediction.
"""

MOST_LAYERS, FEW_LAYERS = 48, (8, 16)
"""A model of more layers is foreseen with few, twice, unless the cache has its run."""

_FIGURES = {"allocated": "allocated", "reserved": "reserved", "shown": "shown", "unknown": "shown"}
_CAPABILITIES = (("v100", (7, 0)), ("t4", (7, 5)), ("h100", (9, 0)), ("h200", (9, 0)), ("b200", (10, 0)))
# Visible bytes of a device whose kind no list has.
_VISIBLE = 0.985


@lru_cache
def _devices() -> dict[str, float]:
    return {name: figures.memory / GIB for name, figures in known_devices().items()}


def capacity(row: Mapping[str, Any]) -> float:
    """Returns the bytes of a row's device that programs can have."""
    if row.get("capacity_gib"):
        return float(row["capacity_gib"]) * GIB
    words, size = row["gpu_kind"].lower(), row["gpu_memory_gib"]
    for name, visible in _devices().items():
        kind, _, rest = name.partition("-")
        if kind in words and re.match(rf"{size:g}gb", rest):
            return visible * GIB
    return _VISIBLE * float(size) * GIB


def memory_of(row: Mapping[str, Any], program: RowProgram, run: ForeseenRun) -> ArmMemory:
    """Returns the memory of a row's program on its device."""
    words = row["gpu_kind"].lower()
    capability = next((found for name, found in _CAPABILITIES if name in words), (8, 0))
    return ArmMemory(
        one=adjusted(row, program, run),
        ranks_per_node=program.per_node,
        capability=capability,
        # Sources of the V100's years are older than CUDA 11.7.
        loads_all_kernels="v100" in words,
        program_error=ROW_ERROR,
    )


def adjusted(row: Mapping[str, Any], program: RowProgram, run: ForeseenRun) -> ForeseenRun:
    """Returns a run without the second copy of the parameters, which FSDP has not if all states have 16 bits."""
    if program.precision != "pure bf16" or "fsdp" not in row["framework"].lower() or not row["zero_stage"]:
        return run
    copies = {KINDS.index("optimizer")}
    share = 2 * run.parameters / program.world
    found = 0.0
    storages = list(run.storages)
    for index, storage in enumerate(storages):
        if storage.kind in copies and storage.place == 0 and found < share - storage.size / 2:
            found += storage.size
            storages[index] = storage._replace(size=0)
    return replace(run, storages=tuple(storages))


def compare(row: Mapping[str, Any], *, runs: bool) -> dict[str, Any]:
    """Returns what was foreseen of a row, beside what was measured.

    Args:
        row: the measurement.
        runs: whether programs that the cache lacks are run.
    """
    found: dict[str, Any] = {"id": row["id"], "model": row["model"], "framework": row["framework"]}
    if missing := lacks(row):
        return {**found, "left_out": missing}
    program = program_of(row)
    pieces = [program]
    if program.layers > MOST_LAYERS and not is_known(program):
        pieces = [replace(program, layers=layers) for layers in FEW_LAYERS]
    if not runs and not all(is_known(each) for each in pieces):
        return {**found, "left_out": "not run"}
    parts = [foreseen(each) for each in pieces]
    if stopped := next((run.stopped for run in parts if run.stopped), ""):
        return {**found, "left_out": f"not foreseen: {stopped[:160]}"}
    arm = memory_of(row, program, parts[-1])
    if len(parts) == 1:
        forecast = arm.at(program.micro_batch)
    else:
        found["layers_run"] = list(FEW_LAYERS)
        forecast = arm.of_live(program.micro_batch, of_more_layers(parts, program.layers))
    highest = forecast.live.highest
    found["moment"] = highest.name if highest else ""
    found["split_gib"] = {kind: round(size / GIB, 2) for kind, size in (highest.split if highest else {}).items()}
    for figure in ("allocated", "reserved", "shown", "needed"):
        found[f"{figure}_gib"] = round(getattr(forecast, figure).mean / GIB, 2)
    # A guess decides the prediction of a row that does not say whether it recomputed activations.
    found["stated"] = "activation_checkpointing" not in row.get("missing", ())
    found.update(_fit(row, forecast))
    found.update(_peak(row, arm, forecast))
    return found


def of_more_layers(runs: Sequence[ForeseenRun], layers: int) -> LiveBytes:
    """Returns the live bytes of a model with more layers, each moment's peak as a line in the layers.

    Args:
        runs: with `FEW_LAYERS`.
        layers: of the model.
    """
    few, more = (replace(run, micro_batch=layers) for run, layers in zip(runs, FEW_LAYERS, strict=True))
    return by_size(few, more).at(layers)


def _fit(row: Mapping[str, Any], forecast: PeakForecast) -> dict[str, Any]:
    if not row.get("gpu_memory_gib") or not {"fit", "no_fit"} & set(row.get("use_for", ())):
        return {}
    chance = forecast.fits(capacity(row))
    fitted = row["outcome"] == "completed"
    return {"fits": round(chance, 3), "fitted": fitted, "right": (chance >= 0.5) == fitted}


def _peak(row: Mapping[str, Any], arm: ArmMemory, forecast: PeakForecast) -> dict[str, Any]:
    kind = row.get("memory_kind")
    if kind is None or kind == "upper bound":
        return {}
    measured = row["peak_memory_gib"] * GIB
    if kind == "allocated at failure":
        # The device was full. The replay on one of its size ends where it fails too.
        outside = outside_pytorch(arm.one.world, arm.ranks_per_node, loads_all_kernels=arm.loads_all_kernels)
        limit = capacity(row) - outside.mean
        failed = replay(arm.one, limit=limit, before=workspaces(arm.capability))
        mean = failed.allocated
        predicted = Uncertain(mean, arm.program_error * mean)
    else:
        predicted = getattr(forecast, _FIGURES[kind])
    low, high = interval(predicted)
    return {
        "memory_kind": kind,
        "measured_gib": row["peak_memory_gib"],
        "foreseen_gib": round(predicted.mean / GIB, 2),
        "low_gib": round(low / GIB, 2),
        "high_gib": round(high / GIB, 2),
        "error": round(predicted.mean / measured - 1, 3),
        "within": low <= measured <= high,
    }


def summary(compared: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures over all rows."""
    rows = list(compared)
    kinds = {
        "allocated": ("allocated", "allocated at failure"),
        "allocated, completed": ("allocated",),
        "reserved or shown": ("reserved", "shown"),
        "kind not stated, as shown": ("unknown",),
    }
    found: dict[str, Any] = {}
    for name, members in kinds.items():
        some = [each for each in rows if each.get("memory_kind") in members]
        stated = [each for each in some if each["stated"]]
        if some:
            found[name] = _errors(some)
        if stated and len(stated) < len(some):
            found[f"{name}, checkpointing stated"] = _errors(stated)
    facts = [each for each in rows if "right" in each]
    for name, members in (("fits", True), ("does not fit", False)):
        some = [each for each in facts if each["fitted"] is members]
        found[name] = {"rows": len(some), "right": sum(each["right"] for each in some)}
    for name, some in (("facts", facts), ("facts, checkpointing stated", [each for each in facts if each["stated"]])):
        if some:
            found[name] = {"rows": len(some), "right": round(sum(each["right"] for each in some) / len(some), 3)}
    left_out = [each["left_out"].partition(":")[0] for each in rows if "left_out" in each]
    found["left_out"] = {why: left_out.count(why) for why in sorted(set(left_out))}
    return found


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "median_error": round(median(abs(each["error"]) for each in rows), 3),
        "worst_error": round(max(abs(each["error"]) for each in rows), 3),
        "within_90": round(sum(each["within"] for each in rows) / len(rows), 2),
    }


def _is_wanted(row: Mapping[str, Any], wanted: str) -> bool:
    return wanted == "all" or bool(row.get("peak_memory_gib")) == (wanted == "peaks")


def main(arguments: list[str] | None = None) -> None:
    """Runs the comparison and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of rows with the same fields")
    parser.add_argument("--wanted", choices=("all", "peaks", "facts"), default="all")
    parser.add_argument("--cached", action="store_true", help="only rows whose run the cache has")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after that time")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    compared = []
    # The smallest runs come first, in case that the time does not suffice for all.
    for row in sorted(read_rows(chosen.rows), key=lambda row: row.get("layers") or 0):
        if not _is_wanted(row, chosen.wanted):
            continue
        runs = not chosen.cached and time.monotonic() - began < chosen.seconds
        found = compare(row, runs=runs)
        compared.append(found)
        keys = ("id", "left_out", "memory_kind", "measured_gib", "foreseen_gib", "error", "fits", "fitted", "right")
        print({key: found[key] for key in keys if key in found}, file=sys.stderr, flush=True)
    results = {"summary": summary(compared), "fitted_constants": {"ROW_ERROR": ROW_ERROR}, "rows": compared}
    chosen.to.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["summary"], indent=1))


if __name__ == "__main__":
    main()
