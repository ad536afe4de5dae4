"""Learns the constants of the foreseen time from public rows: `python -m benchmarks.foresee.public_gpus.fit_speed`.

It prints what `trial_lib/foresee/time/efficiencies.py` has as defaults. A source is a machine with its own
peculiarities, so its rows are no independent measurements. Their weight grows with less than their number. A row that
is far off weighs less, because it is rather misread than slow.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.foresee.public_gpus.model_of_row import ROWS, read_rows
from benchmarks.foresee.public_gpus.row_cluster import cluster_of
from benchmarks.foresee.public_gpus.speed import left_out, runs_of, timed
from trial_lib.foresee.time.efficiencies import CONSTANTS, Constant, Efficiencies
from trial_lib.foresee.time.refit import MeasuredStep, refit
from trial_lib.wire.foreseen_run import ForeseenRun

PRIOR = Efficiencies(
    matmul=Constant(0.7, 0.25),
    attention=Constant(0.8, 0.4),
    memory=Constant(0.8, 0.15),
    link=Constant(0.7, 0.25),
    network=Constant(0.7, 0.4),
    to_host=Constant(0.75, 0.25),
    host_update=Constant(0.4, 0.7),
    launch=Constant(8e-6, 0.3),
    collective=Constant(5e-5, 0.3),
    module=Constant(2e-4, 0.5),
    # Kept at 1: a device that was not measured has no factor of its own.
    whole=Constant(1.0, 0.01),
)
"""What is known without these rows: micro-benchmarks of products, NCCL and copies, and how eager PyTorch issues."""

_ROW_NOISE, _FAR, _ROUNDS = 0.25, 0.4, 4


def fitted(
    rows: Sequence[Mapping[str, Any]], runs: Mapping[int, tuple[ForeseenRun, str]], prior: Efficiencies = PRIOR
) -> Efficiencies:
    """Returns the constants that suit the rows."""
    of_source = Counter(row["source"] for row in rows)
    constants = prior
    for _ in range(_ROUNDS):
        measured = []
        for row in rows:
            run, by = runs[row["id"]]
            found, cluster = timed(row, run, by, constants), cluster_of(row)
            assert cluster is not None
            noise = _ROW_NOISE * of_source[row["source"]] ** 0.25 * math.sqrt(max(1.0, abs(found.error) / _FAR))
            measured.append(MeasuredStep(run, cluster, found.step.seconds * math.exp(found.error), noise))
        constants = refit(measured, prior)
        errors = [timed(row, *runs[row["id"]], constants).error for row in rows]
        print(f"median error {median(abs(math.expm1(each)) for each in errors):.3f}")
    return replace(constants, measured=0, device="")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--formulas", action="store_true", help="take no foreseen run, formulas alone")
    parser.add_argument("--to", type=Path, help="a file for the constants")
    chosen = parser.parse_args(arguments)
    rows = [row for row in read_rows(chosen.rows) if not left_out(row)]
    constants = fitted(rows, runs_of(rows, chosen.formulas))
    for name in CONSTANTS:
        constant = getattr(constants, name)
        print(f"{name:12} {constant.value:.3g} {constant.spread:.2f}")
    if chosen.to:
        chosen.to.write_text(json.dumps(constants.to_json()))


if __name__ == "__main__":
    main()
