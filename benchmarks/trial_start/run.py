"""Measures the phases of one trial, warm and cold, in turn."""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.deepspeed_json import read_deepspeed_json
from trial_lib.experiment.overrides import config_hash
from trial_lib.experiment.study import TrialPaths
from trial_lib.experiment.window import StepWindow
from trial_lib.launch.cold import ColdLauncher, rank_environment
from trial_lib.launch.hardware import this_host
from trial_lib.launch.launcher import Launcher
from trial_lib.launch.program import Program
from trial_lib.launch.trial import TrialPlan, run_trial
from trial_lib.launch.warm import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hello_deepspeed"
RESULTS = ROOT / "benchmarks" / "results" / "trial_start.json"
BUILDERS = ["ShareMemCommBuilder", "FusedAdamBuilder"]


def phases(launcher: Launcher, folder: Path) -> dict[str, float]:
    """Runs one trial and returns its phases, and the whole from launch to the end, in seconds."""
    base = read_deepspeed_json(EXAMPLE / "ds_config.json")
    candidate = Candidate(micro_batch_size=4, gradient_accumulation_steps=1, slots=2)
    config = candidate.complete(base)
    paths = TrialPaths(folder)
    arguments = ["--deepspeed_config", str(paths.ds_config)]
    program = Program(sys.executable, {"script": "train.py"}, arguments, True, EXAMPLE, rank_environment())
    window = StepWindow(start_step=1, end_step=1, max_steps=1)
    plan = TrialPlan(
        folder.name, 0, Purpose.SEARCH, candidate, config, config_hash(config), program, window, None, 300.0, paths
    )
    started = time.perf_counter()
    result = run_trial(plan, launcher, this_host(), folder.parent / "locks", threading.Event())
    whole = time.perf_counter() - started
    assert result.metrics, result.reason
    beyond = sum(result.phases[phase] for phase in ("start", "import", "first_step"))
    return {**result.phases, "start to first step, beyond the engine": beyond, "whole trial": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="trial-start-"))
    environment = rank_environment()
    warm = WarmLauncher(sys.executable, BUILDERS, environment, str(work / "server.log"), print)
    launchers: dict[str, Launcher] = {
        "warm": warm,
        "cold": ColdLauncher(sys.executable, BUILDERS, environment, print),
    }
    started = time.perf_counter()
    phases(warm, work / "first")
    report: dict[str, object] = {"priming and the first trial_s": round(time.perf_counter() - started, 3)}
    phases(launchers["cold"], work / "first-cold")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    for repeat in range(arguments.repeats):
        for name, launcher in launchers.items():
            measured[name].append(phases(launcher, work / f"{name}-{repeat}"))
    warm.close()
    for name, runs in measured.items():
        report[name] = {phase: round(statistics.median(run[phase] for run in runs), 3) for phase in runs[0]}
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
