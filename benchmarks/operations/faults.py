"""MLflow away for minutes, and a disk that becomes full: what each costs a study, and what is missing afterwards.

The command, its trials and its servers are real; a step of the training sleeps, so that a trial takes most of a second.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from disk_fixtures import CannotMountError, fill, small_disk
from server_fixtures import Server, mlflow_server, runs_by_trial
from study_fixtures import Running, Study, Zerotune, migrated_home

RESULTS = Path(__file__).parents[1] / "results" / "operations_faults.json"
PROGRAM = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.2"
_DISK_MIB = 128


def ended(zerotune: Zerotune) -> int:
    """Returns how many trials have ended."""
    return len(list(zerotune.folder.glob("zerotune-studies/*/trials/*/result.json")))


def seconds_until(command: Running, condition: Callable[[], bool], timeout_s: float = 600) -> float:
    """Waits for a condition; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, command.said
        time.sleep(0.1)
    return time.monotonic() - began


def pace(study: Study, between: tuple[float, float]) -> dict[str, float]:
    """Returns the seconds from one trial's end to the next, of those that ended in a span of the wall clock."""
    ends = [moment / 1e9 for moment in sorted(study.result_times().values())]
    gaps = [after - before for before, after in pairwise(ends) if between[0] <= before and after <= between[1]]
    return {"median": round(median(gaps), 2), "longest": round(max(gaps), 2)}


def mlflow_away(folder: Path, home: Path, away_s: float) -> dict[str, Any]:
    """Kills MLflow's server during a study, and starts it again after a while."""
    mlflow = mlflow_server(folder / "mlflow", f"sqlite:///{folder}/mlflow/mlflow.db")
    try:
        mlflow.wait_until_ready()
        zerotune = Zerotune(folder / "away", home, program=PROGRAM)
        trials = str(round(away_s / 2) + 20)
        # Nothing ends it before its trials are spent.
        search = ("asha", "-mt", trials, "-z", "1", "2", "3", "-mct", "1")
        command = zerotune.start(*search, MLFLOW_TRACKING_URI=mlflow.url)
        seconds_until(command, lambda: ended(zerotune) >= 8)
        began, killed_at = zerotune.study.record["started_at"], time.time()
        mlflow.kill()
        while time.time() - killed_at < away_s:
            assert command.process.poll() is None, f"the study ended first: {command.said}"
            time.sleep(0.5)
        back_at = time.time()
        mlflow.start()
        mlflow.wait_until_ready()
        ready_at = time.monotonic()
        seconds_until(command, lambda: behind(zerotune, mlflow) <= 2)
        caught_up = time.monotonic() - ready_at
        finished = command.end(timeout=600)
        assert finished.returncode == 0, finished.stderr
        _, children = runs_by_trial(mlflow.url, "tiny")
        wanted = {f"{number:04d}" for number in zerotune.study.results}
        return {
            "away_s": round(back_at - killed_at),
            "trials": len(wanted),
            "s_a_trial_before": pace(zerotune.study, (began, killed_at)),
            "s_a_trial_while_away": pace(zerotune.study, (killed_at, back_at)),
            "s_from_its_return_until_it_had_all": round(caught_up, 1),
            "trials_missing": len(wanted - children.keys()),
            "trials_twice": sum(len(runs) > 1 for runs in children.values()),
        }
    finally:
        mlflow.kill()


def behind(zerotune: Zerotune, mlflow: Server) -> int:
    """Returns how many trials have ended that MLflow has not."""
    _, children = runs_by_trial(mlflow.url, "tiny")
    return ended(zerotune) - len(children)


def disk_full(folder: Path, home: Path) -> dict[str, Any]:
    """Fills the disk of a study in the middle of a trial, and resumes the study when there is room again."""
    zerotune = Zerotune(folder / "full", home, program=PROGRAM)
    with small_disk(zerotune.folder / "zerotune-studies", _DISK_MIB):
        command = zerotune.start("binary", "-mt", "6", "-z", "1", "-mct", "1")
        seconds_until(command, lambda: ended(zerotune) >= 3)
        study = zerotune.study
        ballast = fill(study.paths.root, 0)
        filled_at = time.monotonic()
        stopped = command.end(timeout=120)
        stopped_after = time.monotonic() - filled_at
        told = {event.number for event in study.told}
        times = study.result_times()
        ballast.unlink()
        resumed = zerotune.run("resume", study.paths.root)
        after = study.result_times()
        return {
            "s_until_it_stopped": round(stopped_after, 1),
            "exit_code": stopped.returncode,
            "said": next(line for line in stopped.stderr.splitlines() if "The disk is full" in line),
            "trials_before": len(told),
            "exit_code_of_the_resume": resumed.returncode,
            "trials_after": len(study.results),
            "trials_lost": len(told - study.results.keys()),
            "trials_run_twice": sum(after[number] != times[number] for number in told),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away-s", type=float, default=180.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="operations-") as name:
        os.environ.pop("PREFECT_API_URL", None)
        folder, home = Path(name), migrated_home(Path(name))
        record["mlflow_away"] = mlflow_away(folder, home, arguments.away_s)
        try:
            record["disk_full"] = disk_full(folder, home)
        except CannotMountError as error:
            record["disk_full"] = f"not run: {error}"
    print(json.dumps(record, indent=2))
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
