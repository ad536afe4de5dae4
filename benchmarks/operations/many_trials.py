"""What a study of thousands of trials costs beside its trials: seconds a trial, the driver's memory, the live table.

The tuning, its flow, its Prefect server and MLflow's store are the real ones; a trial's training takes no time.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

RESULTS = Path(__file__).parents[1] / "results" / "operations_many_trials.json"
MODEL = Path(__file__).parents[2] / "tests" / "programs" / "tiny_study"
_WINDOW = 200  # trials that the first and the last figures are of
# More configurations than trials: a search that has tried all there is ends.
_SPACE = f"""
search_space:
  zero_optimization.reduce_bucket_size: {[1000 * number for number in range(1, 61)]}
"""


class Samples:
    """The driver's memory, and the processor time of it and of its servers, sampled while it runs."""

    def __init__(self, trials: Callable[[], int]) -> None:
        self.rows: list[tuple[int, float, float, float]] = []  # trials so far, MiB, CPU s of the driver, of the others
        self._trials = trials
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Samples":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        own = psutil.Process()
        while not self._done.wait(1.0):
            servers = 0.0
            for child in own.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    servers += sum(child.cpu_times()[:2])
            self.rows.append((self._trials(), own.memory_info().rss / 2**20, sum(own.cpu_times()[:2]), servers))

    def at(self, trials: int) -> tuple[int, float, float, float]:
        """Returns the first sample with so many trials."""
        return next((row for row in self.rows if row[0] >= trials), self.rows[-1])


def study_in(folder: Path, trials: int) -> dict[str, Any]:
    """Runs the command on a study in this process, in `folder`; returns the figures."""
    os.chdir(folder)
    os.environ["FORCE_COLOR"] = "1"  # the table, as in a terminal
    from benchmarks.operations.instant_starter import InstantStarter, stand_in
    from zerotune.flows import live_view, tuning
    from zerotune.trial_lib.study import setup
    from zerotune.trial_lib.study.arguments import StudyArguments
    from zerotune.trial_lib.tracking import sync

    refreshes: list[tuple[int, float]] = []  # trials so far, seconds that a refresh of the table took
    sends: list[float] = []

    def timed(told: Callable[[float], None]) -> Callable[[Any], Any]:
        def wrap(called: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                began = time.thread_time()
                result = called(*arguments, **options)
                told(time.thread_time() - began)
                return result

            return call

        return wrap

    launched = InstantStarter.launched
    stand_in(setup, "WarmStarter", lambda _: InstantStarter)
    for step in ("_read", "_picture"):
        stand_in(live_view.LiveView, step, timed(lambda seconds: refreshes.append((len(launched), seconds))))
    stand_in(sync.StudySync, "_send", timed(sends.append))
    shown = moments_of_updates(live_view.Live)
    config = folder / "experiment.yaml"
    config.write_text((MODEL / "deepspeed.yaml").read_text() + _SPACE)
    arguments = StudyArguments(
        config_path=config,
        model_dir=MODEL,
        method="random",
        max_trials=trials,
        max_search_runner_restarts=0,
    )
    began = time.monotonic()
    with Samples(lambda: len(launched)) as samples, contextlib.redirect_stdout(io.StringIO()) as told:
        code = tuning.tune_command(arguments, as_json=True)
    ended = time.monotonic()
    assert code == 0, told.getvalue()
    return figures(launched, samples, refreshes, shown, sends, ended - began, ended)


def moments_of_updates(live: Any) -> list[float]:
    """Has every update of the live table noted; returns when they were."""
    moments: list[float] = []
    update = live.update

    def noted(*arguments: Any, **options: Any) -> None:
        moments.append(time.monotonic())
        update(*arguments, **options)

    live.update = noted
    return moments


def figures(
    launched: list[float],
    samples: Samples,
    refreshes: list[tuple[int, float]],
    shown: list[float],
    sends: list[float],
    seconds: float,
    ended: float,
) -> dict[str, Any]:
    """Returns what the study has cost."""
    count = len(launched)
    first, last = samples.at(_WINDOW), samples.at(count - 1)
    gaps = [after - before for before, after in pairwise(shown)]
    return {
        "trials": count,
        "seconds": round(seconds, 1),
        "ms_a_trial": {
            "all": 1e3 * (launched[-1] - launched[2]) / (count - 3),
            "first": 1e3 * (launched[_WINDOW] - launched[2]) / (_WINDOW - 2),
            "last": 1e3 * (launched[-1] - launched[-1 - _WINDOW]) / _WINDOW,
        },
        "cpu_ms_a_trial": {
            "driver": 1e3 * (last[2] - first[2]) / max(1, last[0] - first[0]),
            "servers": 1e3 * (last[3] - first[3]) / max(1, last[0] - first[0]),
        },
        "driver_mib": {str(row[0]): round(row[1]) for row in map(samples.at, (_WINDOW, count // 2, count - 1))},
        "live_table_s": {
            "refresh_cpu_first": median(s for at, s in refreshes if at <= _WINDOW),
            "refresh_cpu_last": median(s for at, s in refreshes if at >= count - _WINDOW),
            "median_between_updates": median(gaps),
            "longest_between_updates": max(gaps),
        },
        "mlflow": {"runs": len(sends), "cpu_ms_a_run": 1e3 * sum(sends) / max(1, len(sends))},
        "after_the_last_trial_s": round(ended - launched[-1], 1),
    }


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """Yields a folder to work in, with a ZeroTune home of its own, whose Prefect database is migrated."""
    with tempfile.TemporaryDirectory(prefix="operations-", ignore_cleanup_errors=True) as folder:
        os.environ["XDG_DATA_HOME"] = f"{folder}/home"
        for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)
        migrate = "from zerotune.flows.prefect_server import migrate_own_database; migrate_own_database()"
        subprocess.run([sys.executable, "-c", migrate], check=True)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    output = arguments.output.absolute()
    with home() as folder:
        record = study_in(folder, arguments.trials)
    print(json.dumps(record, indent=2))
    output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
