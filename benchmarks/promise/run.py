"""Tunes a training, trains 200 steps with the winner, and compares what it costs with what the study promised."""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs" / "any"
RESULTS = ROOT / "benchmarks" / "results" / "promise.json"
BIN = Path(sys.executable).parent
STEPS = 200
TOLD = re.compile(r"rank \d+: ([\d.]+) s of processor time a sample")


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def tune(folder: Path) -> dict[str, Any]:
    """Tunes by the command that a user types; returns its result."""
    typed = ["deepspeed", "--num_gpus", "2", "raw_engine.py", "--deepspeed_config", "ds_config.json"]
    command = [str(BIN / "zerotune"), "tune", "-m", "throughput", "--json", "--free-batch", "--max-micro-batch", "64"]
    run = subprocess.run(
        [*command, "--", *typed, "--steps", str(STEPS)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def trained(folder: Path, command: Path) -> float:
    """Trains by the study's command, without ZeroTune; returns seconds of processor time of both ranks a sample."""
    run = subprocess.run(
        ["sh", str(command)], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    told = [float(seconds) for seconds in TOLD.findall(run.stdout)]
    assert len(told) == 2, run.stdout[-2000:] + run.stderr[-2000:]
    return statistics.fmean(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="promise-") as work:
        folder = Path(work) / "programs"
        shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        document = tune(folder)
        study = Path(document["folder"])
        winner = document["confirmation"]["winner"]
        promised = winner["metrics"]["cpu_time_per_sample"]
        measured = [trained(folder, study / "best_command.txt") for _ in range(arguments.repeats)]
    report = {
        "steps": STEPS,
        "winner": winner["name"],
        "gain": winner["gain"],
        "promised_cpu_s_per_sample": promised,
        "trained_cpu_s_per_sample": statistics.median(measured),
        "trainings": measured,
        "trained_over_promised": statistics.median(measured) / promised,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
