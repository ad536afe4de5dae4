"""Lets a trial and a plain training that is past its first steps run in turns, and compares what a sample costs.

Trials and trainings that come one after the other differ by what the machine does meanwhile: thirty pairs tell 2 %.
Here the ranks of one are stopped while those of the other run, every few tenths of a second; what drifts falls on both.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.promise.run import RESULTS, Trials, environment, mean_ratio, programs
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.records.candidate import Candidate

TURN_S = 0.3
TRIAL_STEPS = 36
# Steps of the training before the first turn, and of either before it counts.
AHEAD, SETTLED = 60, 4
WINNER = Candidate(
    knobs={"zero_optimization": {"stage": 2}},
    micro_batch_size=16,
    gradient_accumulation_steps=2,
    slots=2,
    data_parallel_size=2,
)


@dataclass(frozen=True)
class Stopped:
    """Two ranks that have been stopped.

    Attributes:
        thread: ends when they have ended.
        files: the steps of each rank, see `step_file`.
    """

    thread: threading.Thread
    files: Sequence[Path]

    def signal(self, number: int) -> bool:
        """Sends a signal to both; returns whether they are still there."""
        try:
            for file in self.files:
                os.kill(int(file.name.split("-")[1]), number)
        except ProcessLookupError:
            return False
        return True

    @property
    def steps(self) -> int:
        """How many steps both have made."""
        return min(len(steps_in(file)) for file in self.files)

    def cost(self, first: int, last: int) -> float:
        """Returns the seconds of processor time of both ranks a sample, by the median of some steps."""
        return statistics.fmean(statistics.median(steps_in(file)[first:last]) for file in self.files)


def steps_in(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().split("\n")[:-1]]


def stopped_after(run: Callable[[], object], steps: int) -> Stopped:
    """Starts something with two ranks, and stops these when both have made so many steps."""
    folder = Path(os.environ["STEPS_FOLDER"])
    before = set(folder.glob("steps-*"))
    thread = threading.Thread(target=run)
    thread.start()
    while True:
        stopped = Stopped(thread, sorted(set(folder.glob("steps-*")) - before))
        if len(stopped.files) == 2 and stopped.steps >= steps:
            assert stopped.signal(signal.SIGSTOP)
            return stopped
        assert thread.is_alive(), "it ended before it had made its steps"
        time.sleep(0.01)


def take_turns(both: Sequence[Stopped], steps: int) -> list[float]:
    """Lets each run for a while, until one has made so many steps more; then lets both go to their ends.

    Returns:
        The seconds of processor time a sample of each, by as many steps of both, without the first and the last.
    """
    begun = [each.steps for each in both]
    made = 0
    while made < steps:
        for each in both:
            each.signal(signal.SIGCONT)
            time.sleep(TURN_S)
            each.signal(signal.SIGSTOP)
        each_made = [each.steps - since for each, since in zip(both, begun, strict=True)]
        made = max(each_made)
    costs = [each.cost(since + 1, since + min(each_made) - 1) for each, since in zip(both, begun, strict=True)]
    for each in both:
        each.signal(signal.SIGCONT)
    for each in both:
        each.thread.join()
    return costs


def compared(trials: Trials, folder: Path, training: list[str], trial_first: bool) -> float:
    """Returns what a training takes of the processor time of a trial of the same steps, a sample."""

    def train() -> None:
        with reserved_port() as port:
            command = ["deepspeed", "--master_port", str(port), *training]
            subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)

    def start(is_trial: bool) -> Stopped:
        run, ahead = (trials.measured, 0) if is_trial else (train, AHEAD)
        return stopped_after(run, ahead + SETTLED)

    first = start(trial_first)
    second = start(not trial_first)
    costs = take_turns((first, second), TRIAL_STEPS - 3 * SETTLED)
    return costs[1] / costs[0] if trial_first else costs[0] / costs[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=16)
    arguments = parser.parse_args()
    with programs() as folder, tempfile.TemporaryDirectory(prefix="steps-") as steps_folder:
        os.environ["STEPS_FOLDER"] = steps_folder
        shutil.copy(Path(__file__).with_name("step_file.py"), folder / "stopwatch.py")
        config = WINNER.complete(json.loads((folder / "ds_config.json").read_text()))
        (folder / "winner.json").write_text(json.dumps(config))
        steps = str(AHEAD + TRIAL_STEPS)
        training = ["--num_gpus", "2", "raw_engine.py", "--deepspeed_config", "winner.json", "--steps", steps]
        trials = Trials(folder, WINNER, TRIAL_STEPS)
        try:
            ratios = [compared(trials, folder, training, number % 2 == 0) for number in range(arguments.pairs)]
        finally:
            trials.close()
    ratio, error = mean_ratio(ratios)
    report = {"training_over_trial": ratio, "standard_error": error, "pairs": ratios}
    RESULTS.with_name("promise_in_turns.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
