"""Tunes a training, trains 200 steps with the winner again and again, and compares what it costs with trials of it."""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.open_study import new_study
from zerotune.trial_lib.study.runner import Work

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs" / "any"
RESULTS = ROOT / "benchmarks" / "results" / "promise.json"
BIN = Path(sys.executable).parent
STEPS = 200
TYPED = [
    *("deepspeed", "--num_gpus", "2", "raw_engine.py", "--deepspeed_config", "ds_config.json"),
    *("--steps", str(STEPS)),
]
TOLD = re.compile(r"rank \d+: ([\d.]+) s of processor time a sample")


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@contextmanager
def programs() -> Iterator[Path]:
    """Yields a folder with a copy of the programs, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="promise-") as work:
        folder = Path(work) / "programs"
        shutil.copytree(PROGRAMS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        yield folder


def mean_ratio(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the geometric mean of some ratios, and its relative standard error."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logs)), statistics.stdev(logs) / math.sqrt(len(logs))


def tune(folder: Path) -> dict[str, Any]:
    """Tunes by the command that a user types; returns its result."""
    command = [str(BIN / "zerotune"), "tune", "-m", "throughput", "--json", "--free-batch", "--max-micro-batch", "16"]
    run = subprocess.run(
        [*command, "--", *TYPED], cwd=folder, env=environment(), stdout=subprocess.PIPE, check=True, text=True
    )
    document: dict[str, Any] = json.loads(run.stdout)
    return document


class Trials:
    """Trials of one candidate, each in fresh processes: what a confirmation is made of.

    Args:
        folder: of the program.
        candidate: to measure.
        steps: that each measures at least.
    """

    def __init__(self, folder: Path, candidate: Candidate, steps: int = 5) -> None:
        arguments = StudyArguments(
            command=tuple(TYPED), model_dir=folder, metric="throughput", max_trials=2, end_profile_step=steps
        )
        self._candidate = candidate
        self._study = new_study(arguments, folder)
        self._driver = self._study.driver
        self._run(self._driver.profile_plan())

    def _run(self, plan: TrialPlan) -> TrialResult:
        (result,) = self._driver.run(Work((plan,)))
        self._driver.next_ended(timeout_s=0.0)
        assert isinstance(result, TrialResult)
        assert result.outcome is Outcome.COMPLETED, result.reason
        self._driver.tell(result)
        return result

    def measured(self) -> float:
        """Runs one; returns seconds of processor time of both ranks a sample."""
        return self._run(self._driver.plan_again(Purpose.CONFIRM, self._candidate)).metrics["cpu_time_per_sample"]

    def close(self) -> None:
        self._study.close()


def trained(folder: Path, command: Path) -> float:
    """Trains by the study's command, without ZeroTune; returns seconds of processor time of both ranks a sample."""
    run = subprocess.run(
        ["sh", str(command)], cwd=folder, env=environment(), capture_output=True, text=True, check=True
    )
    told = [float(seconds) for seconds in TOLD.findall(run.stdout)]
    assert len(told) == 2, run.stdout[-2000:] + run.stderr[-2000:]
    return statistics.fmean(told)


def pair(trials: Trials, folder: Path, command: Path, number: int) -> tuple[float, float]:
    """Returns what a trial and a training cost, one right after the other: what drifts on the machine falls on both.

    Each comes first in every other pair: what the one leaves behind (memory to be cleared, files to be written) falls
    on both as well.
    """
    if number % 2:
        training = trained(folder, command)
        return trials.measured(), training
    return trials.measured(), trained(folder, command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    with programs() as folder:
        document = tune(folder)
        study = StudyPaths(Path(document["folder"]))
        winner = document["confirmation"]["winner"]
        candidate = Candidate.model_validate_json(study.trial(winner["trials"][0]).candidate.read_text())
        trials = Trials(folder, candidate)
        try:
            pairs = [pair(trials, folder, study.best_command, number) for number in range(arguments.pairs)]
        finally:
            trials.close()
    ratio, error = mean_ratio([training / trial for trial, training in pairs])
    promised = winner["metrics"]["cpu_time_per_sample"]
    trained_five = statistics.median(training for _, training in pairs[:5])
    report = {
        "steps": STEPS,
        "winner": winner["name"],
        "gain": winner["gain"],
        "promised_cpu_s_per_sample": promised,
        "median_of_the_first_five_trainings": trained_five,
        "trained_over_promised": trained_five / promised,
        "trained_over_trial": ratio,
        "standard_error": error,
        "pairs": pairs,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
