"""How much it changes the first updates that DeepSpeed adds bf16 gradients up in bf16, by the accumulation.

    python -m benchmarks.loss_agreement_aa.accumulation

Each program trains the same 64 samples a rank and step, on two real ranks, cut into 1 to 64 micro-batches. The change
of its weights after three updates is compared as a study does. Gradients add up in bf16, as DeepSpeed does by default,
or in 32 bits. Beside it is what two such trainings differ by anyway: the same in other rounding.
"""

import argparse
import json
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loss_agreement_aa.engines import RANKS, Case
from benchmarks.loss_agreement_aa.run import recorded
from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.study.weight_changes import Gap, roundoff

OUT = Path(__file__).resolve().parents[1] / "results" / "bf16_accumulation.json"
SAMPLES = 64
ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)
PROGRAMS = (
    ("decoder", "AdamW", 1e-3),
    ("encoder", "AdamW", 5e-4),
    ("convolutions", "momentum", 0.02),
    ("perceptron", "SGD", 0.1),
)
ROUNDS = 2


def cases_of(program: tuple[str, str, float]) -> dict[tuple[int, str], Case]:
    """The trainings of one program, by the accumulation and the format that gradients add up in."""
    model, optimizer, rate = program
    own = Case(model, "bf16", optimizer, rate, stage=2, samples=SAMPLES)
    found = {
        (accumulation, adds_up): replace(own, micro_batch=SAMPLES // accumulation, adds_up=adds_up)
        for accumulation in ACCUMULATIONS
        for adds_up in ("", "fp32")
    }
    one = found[1, ""]
    return {**found, (1, "in other rounding"): replace(one, rounding=roundoff(one.config(), ()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    each = {program: cases_of(program) for program in PROGRAMS}
    wanted = [
        replace(case, data_seed=seed) for cases in each.values() for case in cases.values() for seed in range(ROUNDS)
    ]
    with tempfile.TemporaryDirectory(prefix="records-") as folder:
        records = recorded(wanted, Path(folder, "records"))

    def apart(one: Case, other: Case) -> float:
        changes = [
            [WeightChange(**records[replace(case, data_seed=seed)]["weight_change"]) for seed in range(ROUNDS)]
            for case in (one, other)
        ]
        return Gap.between(*([change.sums for change in course] for course in changes), changes[0][0].modules).whole

    rows: list[dict[str, Any]] = []
    for program, cases in each.items():
        for accumulation in ACCUMULATIONS:
            rows.append(
                {
                    "model": program[0],
                    "optimizer": program[1],
                    "accumulation": accumulation,
                    "bf16 sums beside 32 bits": apart(cases[accumulation, "fp32"], cases[accumulation, ""]),
                    "this cut beside one micro-batch, in bf16": apart(cases[1, ""], cases[accumulation, ""]),
                    "this cut beside one micro-batch, in 32 bits": apart(cases[1, "fp32"], cases[accumulation, "fp32"]),
                    "in other rounding": apart(cases[1, ""], cases[1, "in other rounding"]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    name = "bf16 sums beside 32 bits"
    report = {
        "command": "python -m benchmarks.loss_agreement_aa.accumulation",
        "machine": platform.processor() or platform.machine(),
        "ranks": RANKS,
        "samples of a rank in a step": SAMPLES,
        "median over the programs": {
            accumulation: median(row[name] for row in rows if row["accumulation"] == accumulation)
            for accumulation in ACCUMULATIONS
        },
        "each": rows,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
