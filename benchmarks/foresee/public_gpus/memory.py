"""Compares the memory of foreseen runs with public measurements: `python -m benchmarks.foresee.public_gpus.memory`.

The bytes of the runs are in `row_bytes.json`, so the comparison is a computation of a second.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.foresee.public_gpus import row_bytes
from benchmarks.foresee.public_gpus.foreseen_rows import OLDER, code, store_of
from benchmarks.foresee.public_gpus.model_of_row import ROWS, is_decided, lacks, program_of, read_rows
from benchmarks.foresee.public_gpus.row_bytes import RowBytes
from benchmarks.foresee.public_gpus.row_device import capacity, outside
from benchmarks.foresee.public_gpus.sound_rows import MISTAKES
from zerotune.trial_lib.plan.device_memory import LiveBytes
from zerotune.trial_lib.plan.fits import (
    GIB,
    GROWS,
    PIECES_ERROR,
    PROGRAM_ERROR,
    ForeseenWay,
    PeakForecast,
    ends_of,
    interval,
    peak_interval,
)
from zerotune.trial_lib.search.budgets import Uncertain

RESULTS = Path(__file__).parents[2] / "results" / "foreseen_memory.json"

RECOMPUTES = 0.76
"""Share of trainings that recompute activations, among sources that say so: the mean of 42 sources of `rows.jsonl`.

It is no memory's figure. It counts for rows whose source does not say so.
"""

_FIGURES = {"allocated": "allocated", "reserved": "reserved", "shown": "shown", "unknown": "shown"}


def compare(row: Mapping[str, Any], store: Path = row_bytes.STORE, code: str = "") -> dict[str, Any]:
    """Returns what was foreseen of a row, beside what was measured.

    Args:
        row: the measurement.
        store: the file with the bytes of its run.
        code: a mark of the code that foresees. A run of other code is not compared. Empty for any.
    """
    found: dict[str, Any] = {"id": row["id"], "model": row["model"], "framework": row["framework"]}
    if missing := lacks(row):
        return {**found, "left_out": missing}
    foreseen = row_bytes.known(row, store)
    if foreseen is None:
        return {**found, "left_out": "not run"}
    if isinstance(foreseen, str):
        return {**found, "left_out": f"not foreseen: {foreseen}"}
    if code and not row_bytes.is_of(code, row, store):
        return {**found, "left_out": OLDER}
    forecast = _forecast(row, foreseen)
    found["moment"], split = row_bytes.split_of(foreseen)
    found["split_gib"] = {kind: round(size / GIB, 2) for kind, size in split.items() if size}
    for figure in ("allocated", "reserved", "shown", "needed"):
        found[f"{figure}_gib"] = round(getattr(forecast, figure).mean / GIB, 2)
    # A guess decides the prediction of a row that does not say whether it recomputed activations.
    found["decided"] = is_decided(row)
    ways = _ways(row, forecast, store)
    found.update(_fit(row, sum(weight * each.fits(capacity(row)) for weight, each in ways)))
    found.update(_peak(row, foreseen, ways))
    return found


def _forecast(row: Mapping[str, Any], foreseen: RowBytes) -> PeakForecast:
    program = program_of(row)
    return PeakForecast.of(
        micro_batch=program.micro_batch,
        live=LiveBytes(place="device", moments=()),
        allocated=foreseen.allocated,
        reserved=foreseen.reserved,
        least=foreseen.least,
        outside=outside(row, program),
    )


def _ways(row: Mapping[str, Any], forecast: PeakForecast, store: Path) -> list[tuple[float, PeakForecast]]:
    """Returns the forecasts of a row with their probabilities.

    If its source does not say whether it recomputes, both count. The first is the row's own.
    """
    other = row_bytes.recomputing(row)
    found = row_bytes.known(other, store) if other else None
    if not isinstance(found, RowBytes):
        return [(1.0, forecast)]
    return [(1 - RECOMPUTES, forecast), (RECOMPUTES, _forecast(other, found))]


def _fit(row: Mapping[str, Any], chance: float) -> dict[str, Any]:
    if capacity(row) == float("inf") or not {"fit", "no_fit"} & set(row.get("use_for", ())):
        return {}
    fitted = row["outcome"] == "completed"
    return {"fits": round(chance, 3), "fitted": fitted, "right": (chance >= 0.5) == fitted}


def _peak(row: Mapping[str, Any], foreseen: RowBytes, ways: Sequence[tuple[float, PeakForecast]]) -> dict[str, Any]:
    kind = row.get("memory_kind")
    if kind in (None, "upper bound") or not row.get("peak_memory_gib"):
        return {}
    measured = row["peak_memory_gib"] * GIB
    most = float("inf")
    if foreseen.at_failure is not None:
        # The device was full. The replay on one of its size ends where it fails too.
        predicted = Uncertain(foreseen.at_failure, PROGRAM_ERROR * foreseen.at_failure)
        low, high = interval(predicted)
    else:
        figure = _FIGURES[kind]
        if kind != "allocated":
            # The run ended well. A full device gives cached segments back, so no more was reserved than it has.
            most = capacity(row) - (outside(row, program_of(row)).mean if kind == "reserved" else 0.0)
        each = [ForeseenWay(weight, getattr(forecast, figure), forecast.needed) for weight, forecast in ways]
        predicted = each[0].figure
        low, high = ends_of(each, most, is_kept=kind != "allocated")
    mean = min(predicted.mean, most)
    return {
        "memory_kind": kind,
        "measured_gib": row["peak_memory_gib"],
        "foreseen_gib": round(mean / GIB, 2),
        "low_gib": round(low / GIB, 2),
        "high_gib": round(high / GIB, 2),
        "error": round(mean / measured - 1, 3),
        "within": low <= measured <= high,
        "within_plan": _is_in_plan(row, ways[0][1], measured) if foreseen.at_failure is None else None,
    }


def _is_in_plan(row: Mapping[str, Any], forecast: PeakForecast, measured: float) -> bool:
    """Returns whether the interval that a plan has for the row's own program holds the figure."""
    if row["memory_kind"] == "allocated":
        low, high = interval(forecast.allocated)
    else:
        low, high = peak_interval(forecast, capacity(row))
        # A plan's peak has the context.
        measured += outside(row, program_of(row)).mean if row["memory_kind"] == "reserved" else 0.0
    return low <= measured <= high


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
        decided = [each for each in some if each["decided"]]
        if some:
            found[name] = _errors(some)
        if decided and len(decided) < len(some):
            found[f"{name}, decided"] = _errors(decided)
    planned = [each for each in rows if each.get("within_plan") is not None]
    for name, some in (
        ("in the plan's own interval", planned),
        ("in the plan's own interval, decided", [each for each in planned if each["decided"]]),
    ):
        found[name] = {"rows": len(some), "within": sum(each["within_plan"] for each in some)}
    facts = [each for each in rows if "right" in each]
    for name, members in (("fits", True), ("does not fit", False)):
        some = [each for each in facts if each["fitted"] is members]
        found[name] = {"rows": len(some), "right": sum(each["right"] for each in some)}
    for name, some in (("facts", facts), ("facts, decided", [each for each in facts if each["decided"]])):
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


def results_of(rows: Iterable[Mapping[str, Any]], store: Path, code: str = "") -> dict[str, Any]:
    """Returns the comparison of all rows by the bytes in a file, of runs by the code with a mark if there is one."""
    compared = []
    for row in rows:
        try:
            compared.append(compare(row, store, code))
        except MISTAKES as error:
            compared.append({"id": row["id"], "left_out": f"{type(error).__name__}: {error}"})
    return {
        "code": code,
        "summary": summary(compared),
        "fitted_constants": {
            "PROGRAM_ERROR": PROGRAM_ERROR,
            "RECOMPUTES": RECOMPUTES,
            "PIECES_ERROR": PIECES_ERROR,
            "GROWS": GROWS,
        },
        "rows": compared,
    }


def main(arguments: list[str] | None = None) -> None:
    """Compares all rows and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="another file of rows with the same fields")
    parser.add_argument("--runs", action="store_true", help="run what the file of bytes lacks")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    rows = read_rows(chosen.rows)
    store = store_of(chosen.rows, row_bytes.STORE)
    if chosen.runs:
        row_bytes.add(rows, lambda: True, store)
    results = results_of(rows, store, code())
    chosen.to.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["summary"], indent=1))
    if older := results["summary"]["left_out"].get(OLDER):
        raise SystemExit(
            f"{older} rows are left out, because older code has foreseen them. --runs foresees them again."
        )


if __name__ == "__main__":
    main()
