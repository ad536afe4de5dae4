"""Compares the memory that the stage `memory` has measured with what a foreseen run of each trial says.

    python -m benchmarks.gpu.foreseen [MEASURED]

The foreseen runs have no GPU: it can be asked anywhere, of results that a GPU has left.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import MODELS, SHAPES
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.plan.device_memory import AllocatorSettings, replay
from zerotune.trial_lib.plan.fits import outside_pytorch, workspaces
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for

RESULTS = Path(__file__).parents[1] / "results"
MEASURED = RESULTS / "gpu_h200_memory.json"
HOPPER = 9.0
MIB = 2**20
_DEADLINE_S = 300.0
_BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
}


def settings_of(arm: str) -> dict[str, Any]:
    """Returns the settings of ZeRO of an arm, as `stages/memory.py` names them."""
    zero: dict[str, Any] = {"stage": int(arm.split()[1].rstrip(","))}
    if arm.endswith("offloaded"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return zero


def compared(rows: list[dict[str, Any]], options: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each trial, measured and foreseen, in MiB.

    Args:
        rows: the trials, as `stages/memory.py` tells them.
        options: further ones of the program.

    Raises:
        RuntimeError: a trial cannot be foreseen.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-foreseen-"))
    try:
        for file in MODELS.glob("*.py"):
            shutil.copy(file, folder)
        (folder / "ds_config.json").write_text(json.dumps(_BASE))
        program = Program(
            interpreter=sys.executable,
            target={"script": "train.py"},
            arguments=["--deepspeed_config", str(folder / "ds_config.json"), *SHAPES["125m"].options, *options],
            local_rank_option="",
            model_dir=folder,
            environment=dict(os.environ),
        )
        starter = starter_for(program, folder / "server", lambda text: print(text, file=sys.stderr))
        try:
            for row in rows:
                overrides = {
                    "zero_optimization": settings_of(row["arm"]),
                    "train_micro_batch_size_per_gpu": row["micro_batch"],
                }
                run = simulate(
                    program, overrides, Pretended(world=1, ranks_per_host=1), folder / "run", starter, _DEADLINE_S
                )
                if run.stopped:
                    raise RuntimeError(f"{row['arm']}, micro-batch {row['micro_batch']}: {run.stopped}")
                found = replay(run, AllocatorSettings(), before=workspaces(HOPPER))
                yield figures(row, found.allocated, found.reserved)
        finally:
            starter.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(row: Mapping[str, Any], allocated: float, reserved: float) -> dict[str, Any]:
    """Returns a trial's figures, each measured and foreseen."""
    pairs = {"allocated": (row["peak"][0], allocated), "reserved": (row["peak_reserved"][0], reserved)}
    shown = [seen for seen in row["device"] if seen.get("shown")]
    if shown:
        # What lies outside PyTorch does not depend on the size.
        pairs["outside PyTorch"] = shown[-1]["shown"] - shown[-1]["reserved"], outside_pytorch(1, 1).mean
    return {
        "arm": row["arm"],
        "micro_batch": row["micro_batch"],
        **{
            name: {"measured": round(one / MIB), "foreseen": round(other / MIB)} for name, (one, other) in pairs.items()
        },
    }


def main() -> None:
    """Compares, prints a table, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="?", default=MEASURED)
    parser.add_argument(
        "--made_on", default="cpu", help="where the program made its model; on the H200 on the processor"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_h200_memory_foreseen.json")
    arguments = parser.parse_args()
    measured = json.loads(arguments.measured.read_text())["figures"]["trials"]
    rows = []
    for row in compared([row for row in measured if row["outcome"] == "completed"], ["--made_on", arguments.made_on]):
        print(row, flush=True)
        rows.append(row)
    errors = {
        name: round(statistics.median(abs(row[name]["foreseen"] / row[name]["measured"] - 1) for row in rows), 4)
        for name in ("allocated", "reserved", "outside PyTorch")
        if all(name in row for row in rows)
    }
    print(errors)
    result = {"measured by": arguments.measured.name, "median error": errors, "MiB": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
