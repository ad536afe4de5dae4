"""Compares the steps that `study` and `switches` have timed on a GPU with what a foreseen run of each says.

    python -m benchmarks.gpu.foreseen_steps

The foreseen runs have no GPU: it can be asked anywhere, of results that a GPU has left. No default is fitted to them.
Each step is foreseen a second time with the constants refitted to all others.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import MODELS, SHAPES, Shape
from benchmarks.gpu.refit import MeasuredStep, refit
from benchmarks.gpu.stages.switches import CASES
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.plan.device_memory import AllocatorSettings, replay
from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.fits import workspaces
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.plan.step_time import planned_step

RESULTS = Path(__file__).parents[1] / "results"
OUTPUT = RESULTS / "gpu_h200_steps_foreseen.json"
DEVICE, HOPPER = "h200-141gb", 9.0
MIB = 2**20
_DEADLINE_S = 300.0
_BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16": {"enabled": True}}


def of_switches() -> Iterator[dict[str, Any]]:
    """Yields the cases of `stages/switches.py` with the model of this folder: 8 samples of 134 M parameters."""
    figures = json.loads((RESULTS / "gpu_h200_switches.json").read_text())["figures"]
    for name, turned in CASES.items():
        seconds, above, _ = figures[f"{name}: seconds a step, bytes above initialisation, seconds of the trial"]
        overrides = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 0},
            "program": turned,
        }
        yield {"case": name, "shape": "125m", "overrides": overrides, "seconds": seconds, "above": above}


def of_study() -> Iterator[dict[str, Any]]:
    """Yields the configurations of `stages/study.py`, each with the median of its trials: 953 M parameters."""
    trials = json.loads((RESULTS / "gpu_h200_study.json").read_text())["figures"]["trials"]
    by_case: dict[str, list[dict[str, Any]]] = {}
    for trial in trials:
        if trial["purpose"] != "profile":
            by_case.setdefault(json.dumps([trial["label"].rpartition("mbs")[2], trial["zero"]]), []).append(trial)
    for case, found in by_case.items():
        size, zero = json.loads(case)
        accumulation = 8 // int(size)
        overrides = {
            "train_micro_batch_size_per_gpu": int(size),
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": zero or {"stage": 0},
        }
        yield {
            "case": ", ".join(
                [f"ZeRO {zero.get('stage', 0)}", *(key for key in zero if key != "stage"), f"size {size}"]
            ),
            "shape": "1b",
            "overrides": overrides,
            "seconds": 8 / statistics.median(trial["throughput"] for trial in found),
            "trials": len(found),
        }


def program_of(shape: Shape, folder: Path) -> Program:
    """Returns the program of this folder with a shape, as its user types it."""
    return Program(
        interpreter=sys.executable,
        target={"script": "train.py"},
        arguments=["--deepspeed_config", str(folder / "ds_config.json"), *shape.options],
        local_rank_option="",
        model_dir=folder,
        environment=dict(os.environ),
    )


def compared(case: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], MeasuredStep]:
    """Returns a case's figures, measured and foreseen, and its step for the refit.

    Args:
        case: with the measured ones.
        folder: of the program.

    Raises:
        RuntimeError: the case cannot be foreseen.
    """
    program = program_of(SHAPES[case["shape"]], folder)
    starter = starter_for(program, folder / "server", lambda text: print(text, file=sys.stderr))
    try:
        world = Pretended(world=1, ranks_per_host=1)
        run = simulate(program, case["overrides"], world, folder / "run", starter, _DEADLINE_S)
    finally:
        starter.close()
    if run.stopped:
        raise RuntimeError(f"{case['case']}: {run.stopped}")
    cluster = Cluster(device=known_devices()[DEVICE])
    step = planned_step(run, cluster)
    row: dict[str, Any] = {
        "case": case["case"],
        "ms": {"measured": 1e3 * case["seconds"], "foreseen": 1e3 * step.seconds},
        "interval": [1e3 * step.low, 1e3 * step.high],
        "foreseen over measured": step.seconds / case["seconds"],
        "foreseen parts, ms": {name: 1e3 * part for name, part in step.parts.items()},
    }
    if "above" in case:
        found = replay(run, AllocatorSettings(), before=workspaces(HOPPER))
        row["foreseen peak, MiB"], row["measured above initialisation, MiB"] = (
            found.allocated / MIB,
            case["above"] / MIB,
        )
    return row, MeasuredStep(run=run, cluster=cluster, seconds=case["seconds"])


def refitted(steps: Sequence[MeasuredStep]) -> list[dict[str, Any]]:
    """Returns each step's figures as foreseen with the constants that the other steps have taught."""
    rows = []
    for number, own in enumerate(steps):
        constants = refit([*steps[:number], *steps[number + 1 :]])
        step = planned_step(own.run, own.cluster, constants)
        rows.append(
            {"foreseen over measured": step.seconds / own.seconds, "interval": [1e3 * step.low, 1e3 * step.high]}
        )
    return rows


def summed_up(rows: Sequence[Mapping[str, Any]], measured: Sequence[float]) -> dict[str, Any]:
    """Returns how far off rows are at the median, and how many of their 90 % intervals hold the measured seconds."""
    off = statistics.median(abs(row["foreseen over measured"] - 1) for row in rows)
    pairs = zip(rows, measured, strict=True)
    within = sum(row["interval"][0] <= 1e3 * seconds <= row["interval"][1] for row, seconds in pairs)
    return {"median error": off, "within the interval": f"{within} of {len(rows)}"}


def rounded(value: Any) -> Any:
    """Returns figures with three digits behind the point, whatever holds them."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Compares, prints a line for each case, and writes the result."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-foreseen-"))
    rows: list[dict[str, Any]] = []
    steps: list[MeasuredStep] = []
    try:
        for file in MODELS.glob("*.py"):
            shutil.copy(file, folder)
        (folder / "ds_config.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **_BASE}))
        for case in (*of_switches(), *of_study()):
            row, step = compared(case, folder)
            print(json.dumps(rounded(row)), flush=True)
            rows.append(row)
            steps.append(step)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds, after = [step.seconds for step in steps], refitted(steps)
    for row, again in zip(rows, after, strict=True):
        row["refitted to the others"] = again
    result = {"by the defaults": summed_up(rows, seconds), "refitted to the others": summed_up(after, seconds)}
    print(json.dumps(rounded(result)))
    OUTPUT.write_text(json.dumps(rounded({**result, "rows": rows}), indent=1) + "\n")


if __name__ == "__main__":
    main()
