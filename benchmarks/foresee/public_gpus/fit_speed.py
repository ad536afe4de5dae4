"""Learns the constants of the foreseen time from public rows: `python -m benchmarks.foresee.public_gpus.fit_speed`.

It prints what `trial_lib/plan/devices.py` has as defaults, and how far off each source is by constants fitted without
it. A source is a machine with its own peculiarities, so its rows are no independent measurements. Their weight grows
with less than their number. A row that is far off weighs less, because it is rather misread than slow.
"""

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.foresee.public_gpus.model_of_row import ROWS, read_rows
from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from benchmarks.foresee.public_gpus.speed import (
    CONSTANTS,
    changed,
    groups,
    has_no_step,
    left_out,
    runs_of,
    timed,
    wide_key,
)
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.devices import Constant, DeviceFigures, Efficiencies, known_devices

PRIOR = Efficiencies(
    matmul=Constant(0.7, 0.25),
    attention=Constant(1.0, 0.2),
    memory=Constant(0.8, 0.15),
    link=Constant(0.7, 0.25),
    network=Constant(0.7, 0.4),
    to_host=Constant(0.75, 0.25),
    host_update=Constant(0.4, 0.7),
    launch=Constant(1.6e-5, 0.5),
    collective=Constant(5e-5, 0.3),
    module=Constant(2e-4, 0.5),
    # Kept at 1: a device that was not measured has no factor of its own.
    whole=Constant(1.0, 0.01),
)
"""What is known without these rows: micro-benchmarks of products, NCCL and copies, and how eager PyTorch issues.

That is the time of an H200's host (`benchmarks/results/gpu_h200_steps_foreseen.json`).
"""

ATTAINED = "attained, V100"
"""How a V100 falls short of others (`attained` in `devices.yaml`), for which no measured product was found.

Without it the rows of V100 would decide `matmul` for all devices.
"""

_OF_VOLTA = Constant(0.8, 0.4)
_SPREADS = {**{name: getattr(PRIOR, name).spread for name in CONSTANTS}, ATTAINED: _OF_VOLTA.spread}
RESULTS = Path(__file__).parents[2] / "results" / "foreseen_speed_left_out.json"
_ROW_NOISE, _ROUNDS, _LONGEST, _SURE = 0.25, 8, 0.5, 0.02
# How far off a row is from where on it weighs less, in medians of all: 1.345 standard deviations (Huber, Annals of
# Mathematical Statistics 35, 1964), of which a median is 0.6745.
_FAR = 1.345 / 0.6745
_OF_A_GROUP = 3
_HELD = 0.9
_QUANTILE_90 = 1.645
# What decides a step, by its constants.
_DECIDED_BY = {
    "products of matrices": ("matmul",),
    "attention": ("attention",),
    "other passes": ("memory",),
    "links": ("link", "network"),
    "the host's issuing": ("launch", "collective", "module"),
    "the host's memory": ("to_host", "host_update", "disk"),
}
_MUCH = 0.3
# A step grows with these constants, and shrinks with the others.
_GROWING = ("launch", "collective", "module", "whole")


@dataclass(frozen=True)
class Fit:
    """Constants that suit rows, and the line around them.

    Attributes:
        rows: the measurements.
        constants: the fitted ones.
        shifts: logarithms of their ratios to `PRIOR`, and that of `ATTAINED` to its own.
        errors: logarithms of foreseen over measured speed.
        slopes: of the logarithm of a step's seconds, by row and constant.
        noise: of each row.
    """

    rows: Sequence[Mapping[str, Any]]
    constants: Efficiencies
    shifts: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray
    noise: np.ndarray

    def change(self, kept: np.ndarray) -> np.ndarray:
        """Returns the step to the most likely shifts given some of the rows."""
        spreads = np.array(list(_SPREADS.values()))
        weighted = self.slopes[kept] / self.noise[kept, None]
        lines = np.vstack([weighted, np.diag(1 / spreads)])
        wanted = np.concatenate([self.errors[kept] / self.noise[kept], -self.shifts / spreads])
        found: np.ndarray = np.linalg.lstsq(lines, wanted, rcond=None)[0]
        return np.clip(found, -_LONGEST, _LONGEST)


def fitted(
    rows: Sequence[Mapping[str, Any]], runs: Mapping[int | str, tuple[ForeseenRun, str]], start: Efficiencies
) -> Fit:
    """Returns the constants that suit the rows, by a few steps of Gauss and Newton.

    Args:
        rows: the measurements.
        runs: the operations of each.
        start: where the steps begin. It does not count as a measurement, as `PRIOR` does.
    """
    logs = [math.log(getattr(start, name).value / getattr(PRIOR, name).value) for name in CONSTANTS]
    fit = line_of(rows, runs, np.array([*logs, math.log(_volta().attained / _OF_VOLTA.value)]))
    for _ in range(_ROUNDS):
        change = fit.change(np.ones(len(rows), dtype=bool))
        fit = line_of(rows, runs, fit.shifts + change)
        if float(np.abs(change).max()) < _SURE:
            break
    return fit


def some_of_each(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most three rows of each group: with the fewest tokens of a micro-batch, the most, and one between."""
    found: list[Mapping[str, Any]] = []
    for members in groups(rows, wide_key).values():
        ordered = sorted(members, key=lambda row: (row["micro_batch"] * row["seq_len"], row["id"]))
        count = min(_OF_A_GROUP, len(ordered))
        found += [ordered[round(index * (len(ordered) - 1) / max(1, count - 1))] for index in range(count)]
    return found


def line_of(
    rows: Sequence[Mapping[str, Any]], runs: Mapping[int | str, tuple[ForeseenRun, str]], shifts: np.ndarray
) -> Fit:
    """Returns the line around constants, which need not be those that suit the rows."""
    of_source = Counter(row["source"] for row in rows)
    logs = dict(zip(_SPREADS, shifts.tolist(), strict=True))
    of_volta = {"matmul": logs.pop(ATTAINED) + math.log(_OF_VOLTA.value / _volta().attained)}
    constants = changed(PRIOR, logs)
    on_volta = [_is_on_volta(row) for row in rows]
    found = [
        timed(row, *runs[row["id"]], changed(constants, of_volta) if is_volta else constants)
        for row, is_volta in zip(rows, on_volta, strict=True)
    ]
    far = _FAR * median(abs(each.error) for each in found)
    signs = {name: 1.0 if name in _GROWING else -1.0 for name in CONSTANTS}
    return Fit(
        rows=rows,
        constants=constants,
        shifts=shifts,
        errors=np.array([each.error for each in found]),
        slopes=np.array(
            [
                [*(signs[name] * each.step.shares[name] for name in CONSTANTS), -each.step.shares["matmul"] * is_volta]
                for each, is_volta in zip(found, on_volta, strict=True)
            ]
        ),
        noise=np.array(
            [
                _ROW_NOISE * of_source[each.row["source"]] ** 0.25 * math.sqrt(max(1.0, abs(each.error) / far))
                for each in found
            ]
        ),
    )


@lru_cache
def _volta() -> DeviceFigures:
    return known_devices()["v100-32gb"]


def _is_on_volta(row: Mapping[str, Any]) -> bool:
    cluster = cluster_of(row)
    return cluster is not None and cluster.device.capability == _volta().capability


def refitted(
    fit: Fit, rows: Sequence[Mapping[str, Any]], runs: Mapping[int | str, tuple[ForeseenRun, str]]
) -> np.ndarray:
    """Returns the errors of rows, which need not be those of a fit, by constants fitted without their own owner's."""
    owners = np.array([_owner_of(row) for row in rows])
    errors = np.zeros(len(rows))
    for owner in sorted(set(owners)):
        others = fitted([row for row in fit.rows if _owner_of(row) != owner], runs, fit.constants)
        own = owners == owner
        errors[own] = line_of([row for row in rows if _owner_of(row) == owner], runs, others.shifts).errors
    return errors


def _owner_of(row: Mapping[str, Any]) -> str:
    # Of the repository, because files of one owner often have one machine.
    words = str(row["source"]).removeprefix("https://github.com/")
    return re.split(r"[/ ]", words)[0].removesuffix("-workshop")


def _is_inside(fit: Fit, errors: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Returns which errors the 90 % interval has."""
    found: np.ndarray = np.abs(errors) <= _QUANTILE_90 * np.sqrt((fit.slopes**2) @ spreads**2)
    return found


def _least_spread(fit: Fit, sources: np.ndarray, errors: np.ndarray, spreads: np.ndarray, counted: np.ndarray) -> float:
    """Returns the least spread of what the constants leave out by which 90 % of the counted left-out rows are held.

    A source counts by the root of its rows.
    """
    count = Counter(sources.tolist())
    weights = counted * np.array([1 / math.sqrt(count[each]) for each in sources])
    spreads = spreads.copy()
    for hundredth in range(5, 100):
        spreads[CONSTANTS.index("whole")] = hundredth / 100
        if float(weights @ _is_inside(fit, errors, spreads)) >= _HELD * float(weights.sum()):
            break
    return float(spreads[CONSTANTS.index("whole")])


def each_left_out(fit: Fit, errors: np.ndarray) -> dict[str, Any]:
    """Returns how far off each source is.

    Args:
        fit: of all rows.
        errors: of each by constants that its own source did not decide.
    """
    sources = np.array([row["source"] for row in fit.rows])
    # The spread of `matmul` has that of `ATTAINED`.
    spreads = np.array([*(getattr(Efficiencies(), name).spread for name in CONSTANTS), 0.0])
    moved = [fit.change(sources != source) for source in sorted(set(sources))]
    values = {name: getattr(fit.constants, name).value for name in CONSTANTS}
    values[ATTAINED] = _OF_VOLTA.value * math.exp(fit.shifts[-1])
    whole, every = CONSTANTS.index("whole"), np.ones(len(sources), dtype=bool)
    # Rows are held by a width that their owner's have not decided either.
    owners, inside = np.array([_owner_of(row) for row in fit.rows]), ~every
    for owner in sorted(set(owners)):
        others = spreads.copy()
        others[whole] = _least_spread(fit, sources, errors, spreads, owners != owner)
        inside |= (owners == owner) & _is_inside(fit, errors, others)
    spreads[whole] = _least_spread(fit, sources, errors, spreads, every)
    apart = np.array(moved) - np.mean(moved, axis=0)
    jackknife = np.sqrt((len(moved) - 1) / len(moved) * (apart**2).sum(axis=0))
    by_source = {
        source: {
            "rows": int((sources == source).sum()),
            "median_of_logarithm": round(float(np.median(errors[sources == source])), 3),
            "within_90": round(float(inside[sources == source].mean()), 2),
        }
        for source in sorted(set(sources))
    }
    off = np.abs(np.expm1(errors))
    parts: dict[str, list[int]] = defaultdict(list)
    for index, (row, slopes) in enumerate(zip(fit.rows, np.abs(fit.slopes), strict=True)):
        shares = {kind: sum(slopes[CONSTANTS.index(name)] for name in names) for kind, names in _DECIDED_BY.items()}
        parts[str(row.get("gpu_kind")).partition("-")[0]].append(index)
        parts[f"ZeRO {row.get('zero_stage')}{', offload' if row.get('offload_optimizer') == 'cpu' else ''}"].append(
            index
        )
        parts[f"most by {max(shares, key=lambda kind: shares[kind])}"].append(index)
        if shares["links"] > _MUCH:
            parts[f"links over {_MUCH:.0%}"].append(index)
    return {
        "rows": len(errors),
        "sources": len(moved),
        "whole_spread": float(spreads[CONSTANTS.index("whole")]),
        "by_part": {
            name: {
                "rows": len(own),
                "within_90": round(float(inside[own].mean()), 2),
                "median_error": round(float(np.median(off[own])), 3),
                "median_of_logarithm": round(float(np.median(errors[own])), 3),
            }
            for name, own in sorted(parts.items())
        },
        "median_error": round(float(np.median(off)), 3),
        "within_90": round(float(inside.mean()), 3),
        "within_90_mean_of_sources": round(float(np.mean([each["within_90"] for each in by_source.values()])), 3),
        "constants": {
            name: {"value": float(f"{value:.3g}"), "uncertainty": round(float(error), 3)}
            for (name, value), error in zip(values.items(), jackknife, strict=True)
        },
        "by_source": by_source,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--formulas", action="store_true", help="take no foreseen run, formulas alone")
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    rows = [row for row in read_rows(chosen.rows) if not has_no_step(row)]
    runs = runs_of(rows, chosen.formulas)
    fit = fitted(some_of_each([row for row in rows if not left_out(row)]), runs, Efficiencies())
    whole = some_of_each(rows)
    errors = refitted(fit, [*fit.rows, *whole], runs)
    of_fit, of_whole = errors[: len(fit.rows)], errors[len(fit.rows) :]
    results = {
        **each_left_out(fit, of_fit),
        # Those that cannot be compared are judged here, and decide nothing.
        "all rows": {
            "rows": len(whole),
            "median_error": round(float(np.median(np.abs(np.expm1(of_whole)))), 3),
        },
    }
    chosen.to.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({name: value for name, value in results.items() if name != "by_source"}, indent=1))


if __name__ == "__main__":
    main()
