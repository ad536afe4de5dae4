"""Measures the cost of `--foresee` at the start of a study: studies with and without it, in turn.

    python -m benchmarks.foresee.study_start --rounds 2

The program is `examples/hello_deepspeed` on two CPU ranks. These are all the cores that the test machine has, so the
foreseen runs compete with the profile trial. The result file is `benchmarks/results/foresee_study_start.json`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hello_deepspeed"
RESULTS = ROOT / "benchmarks" / "results" / "foresee_study_start.json"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
EXPERIMENT = {
    "name": "study-start",
    "entrypoint": ["deepspeed", "train.py", "--deepspeed_config", "ds_config.json"],
    "hyperparameters": {"deepspeed_config": "ds_config.json"},
    "resources": {"slots_per_trial": 2},
}


def study(work: Path, *flags: str) -> dict[str, float]:
    """Runs a study of two trials. Returns seconds from its command to some of its moments, and processor seconds."""
    work.mkdir()
    shutil.copytree(EXAMPLE, work / "model", ignore=shutil.ignore_patterns("__pycache__"))
    (work / "model" / "ds_config.json").write_text(json.dumps(CONFIG))
    (work / "experiment.yaml").write_text(json.dumps(EXPERIMENT))
    zerotune = [str(Path(sys.executable).parent / "zerotune"), "adaptive", "experiment.yaml", "model"]
    limits = ["-z", "0", "1", "2", "3", "--max-trials", "2", "--free-batch", "--json"]
    before = os.times()
    started = time.time()
    run = subprocess.run(
        [*zerotune, *limits, *flags],
        cwd=work,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ended, after = time.time(), os.times()
    folder = Path(json.loads(run.stdout)["folder"])
    results = [json.loads(path.read_text()) for path in sorted((folder / "trials").glob("*/result.json"))]
    profile = next(result for result in results if result["purpose"] == "profile")
    begins = profile["started_at"]
    ends = begins + sum(profile["phases"].values())
    following = min(result["started_at"] for result in results if result["purpose"] != "profile")
    foreseen = folder / "foreseen.json"
    return {
        "profile_begins_s": begins - started,
        "profile_s": ends - begins,
        "second_trial_begins_s": following - started,
        "wall_s": ended - started,
        "processor_s": sum(after[2:4]) - sum(before[2:4]),
        "arms_foreseen": float(len(json.loads(foreseen.read_text()))) if foreseen.exists() else 0.0,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Returns the median of each figure, and all runs."""
    figures = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    return {**figures, "runs": [{name: round(value, 2) for name, value in run.items()} for run in runs]}


def save(runs: dict[str, list[dict[str, float]]]) -> None:
    """Writes what has been measured so far."""
    pairs = zip(runs["with"], runs["without"], strict=True)
    later = [one["second_trial_begins_s"] - other["second_trial_begins_s"] for one, other in pairs]
    record = {
        "command": "python -m benchmarks.foresee.study_start " + " ".join(sys.argv[1:]),
        "load_average_at_the_end": round(os.getloadavg()[0], 1),
        **{name: medians(each) for name, each in runs.items()},
        "second_trial_begins_later_s": round(statistics.median(later), 2),
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="studies of each kind, after one that does not count")
    rounds = parser.parse_args().rounds
    kinds: dict[str, tuple[str, ...]] = {"without": (), "with": ("--foresee",)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="study-start-") as work:
        # The first command of a machine builds DeepSpeed's operators.
        study(Path(work) / "first")
        for number in range(rounds):
            for name, flags in list(kinds.items())[:: 1 if number % 2 else -1]:
                runs[name].append(study(Path(work) / f"{name}-{number}", *flags))
                print(name, {figure: round(value, 1) for figure, value in runs[name][-1].items()}, flush=True)
            save(runs)


if __name__ == "__main__":
    main()
