"""Profiles programs whose rows depend on each other and programs whose rows do not, and counts what the test finds."""

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.programs.commands import BY_FILE, CONFIG, HALF, OWN, PROGRAMS, REDUCTIONS, Program, others
from benchmarks.programs.trials import trials_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "rows.json"
# What each kind of `tests/programs/across_rows.py` is.
KINDS = {
    "batch_norm": "layers",
    "untracked_batch_norm": "layers",
    "whitened": "layers",
    "attention_over_samples": "layers",
    "info_nce": "loss",
    "triplets": "loss",
    "experts": "loss",
    "padded": "unequal",
    "group_norm": "",
    "instance_norm": "",
    "layer_norm": "",
    "frozen_batch_norm": "",
    "dropout": "",
    "regression": "",
}
# torch has no such layer on a CPU in bf16 with running statistics in fp32, which DeepSpeed leaves there.
NOT_IN_HALF = ("batch_norm", "frozen_batch_norm")
# DeepSpeed's mixture drops tokens beyond its experts' capacity, which the whole micro-batch shares.
OTHERS = {"experts": ("layers", "loss")}


def programs(stages: tuple[int, ...]) -> list[tuple[Program, tuple[str, ...]]]:
    """The programs, each with the kinds that are right for it."""
    found: list[tuple[Program, tuple[str, ...]]] = []
    for position, (kind, right) in enumerate(KINDS.items()):
        for inside in (0, 1):
            for half in (False, True)[: 1 if kind in NOT_IN_HALF else 2]:
                stage = stages[(position + 2 * inside + half) % len(stages)]
                config = {**CONFIG, **(HALF if half else {}), "zero_optimization": {"stage": stage}}
                typed = BY_FILE.format(f"across_rows.py --kind {kind} --inside {inside}").split()
                where, dtype = "in the model" if inside else "outside", "bf16" if half else "fp32"
                name = f"{kind}, loss {where}, {dtype}, ZeRO {stage}"
                found.append((Program(name, PROGRAMS, tuple(typed), config=config), (right,)))
    found += [(program, ("",)) for program in [*OWN, *REDUCTIONS]]
    return [*found, *((program, OTHERS.get(program.name, ("",))) for program in others())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for program, right in programs(tuple(arguments.stages)):
        if arguments.only not in program.name:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="rows-") as work,
            trials_of(program, program.copy(Path(work))) as trials,
        ):
            profile = trials.profile
        found = None if profile.program is None else profile.program.across_rows
        row: dict[str, Any] = {"program": program.name, "right": list(right), "why": profile.reason}
        if found is not None:
            step = profile.metrics.get("latency", 0.0)
            row |= {"kind": found.kind, "names": found.names, "undecided": found.undecided}
            row |= {"test_ms": round(1e3 * found.seconds, 1), "step_of_profile_ms": round(1e3 * step, 1)}
        rows.append(row)
        print(row, flush=True)
        if not arguments.only:
            RESULTS.write_text(json.dumps(summary(rows), indent=2) + "\n")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was found so far, and what of it is wrong."""
    tested = [row for row in rows if "kind" in row]
    depend = [row for row in tested if "" not in row["right"]]
    return {
        "command": "python -m benchmarks.rows.run",
        "machine": platform.processor() or platform.machine(),
        "programs": len(rows),
        "tested": len(tested),
        "depend": len(depend),
        "found": sum(row["kind"] in row["right"] for row in depend),
        "missed": [row["program"] for row in depend if row["kind"] not in row["right"]],
        "row_wise": len(tested) - len(depend),
        "false_alarms": [row["program"] for row in tested if "" in row["right"] and row["kind"]],
        "undecided": [row["program"] for row in tested if row["undecided"]],
        "each": rows,
    }


if __name__ == "__main__":
    main()
