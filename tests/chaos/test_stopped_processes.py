"""Stopping each process that guards a trial, as SIGSTOP does: what it guards ends all the same, and leaves nothing."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from study_fixtures import BIN
from test_launch_chaos import completes, driven, gone, own_starter, ranks_of, started  # noqa: F401

pytestmark = pytest.mark.alone


@dataclass(frozen=True)
class Guarded:
    """A trial whose ranks work for ever.

    Attributes:
        running: the trial.
        guard: the parent of its ranks.
        watchdog: the parent of that.
        its_own: what it has outside its folder.
    """

    running: Any
    guard: psutil.Process
    watchdog: psutil.Process
    its_own: list[Path]

    def leaves_nothing(self, trials: Any) -> None:
        """Checks that its processes are gone, and all that it had outside its folder."""
        gone(trials, [*self.running.pids(), self.guard.pid, self.watchdog.pid])
        assert not [path for path in self.its_own if path.exists()]

    def ends_when_cancelled(self, trials: Any) -> None:
        """Cancels it, and checks that it ends so, and that nothing is left."""
        self.running.cancel()
        assert self.running.result().outcome == "cancelled"
        self.leaves_nothing(trials)

    def ends_as_crashed(self, trials: Any) -> None:
        """Checks that it ends as crashed, that its guard is named, and that nothing is left."""
        result = self.running.result()
        assert (result.outcome, result.from_outside) == ("crashed", True)
        assert "guard" in result.reason
        self.leaves_nothing(trials)


def guarded(trials: Any) -> Guarded:
    """Starts a trial whose ranks work for ever."""
    running = started(trials, "--hang", "spin")
    rank = psutil.Process(ranks_of(running)[0])
    guard = rank.parent()
    return Guarded(running, guard, guard.parent(), left_by(rank))


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def left_by(rank: psutil.Process) -> list[Path]:
    """Returns what a rank's trial has outside its folder: the folder of its workers, and its buffers."""
    mapped = {Path(mapping.path) for mapping in rank.memory_maps()}
    buffers = [path for path in mapped if path.name.startswith("deepspeed_allreduce_buffer_")]
    return [Path(os.environ.get("TMPDIR") or "/tmp", f"zerotune-workers-{rank.ppid()}"), *buffers]


@pytest.mark.long
def test_a_stopped_guard_does_not_hold_up_a_cancelled_trial_and_nothing_is_left(trials):
    trial = guarded(trials)
    assert len(trial.its_own) > 1
    assert all(path.exists() for path in trial.its_own)
    stop(trial.guard)
    trial.ends_when_cancelled(trials)


@pytest.mark.long
def test_a_watchdog_that_stays_stopped_is_woken_when_its_trial_has_ended(trials):
    trial = guarded(trials)
    stop(trial.watchdog)
    trial.ends_when_cancelled(trials)


def test_a_guard_and_its_watchdog_that_are_stopped_do_not_hold_up_a_cancelled_trial_and_nothing_is_left(trials):
    trial = guarded(trials)
    stop(trial.guard)
    stop(trial.watchdog)
    trial.ends_when_cancelled(trials)


@pytest.mark.long
def test_a_guard_and_its_watchdog_that_stay_stopped_cost_their_trial_which_says_so(trials):
    trial = guarded(trials)
    stop(trial.guard)
    stop(trial.watchdog)
    trial.ends_as_crashed(trials)


@pytest.mark.long
def test_a_guard_that_stays_stopped_ends_as_crashed(trials):
    trial = guarded(trials)
    stop(trial.guard)
    trial.ends_as_crashed(trials)


@pytest.mark.long
def test_a_fork_server_that_stays_stopped_is_replaced_and_that_is_told(trials, own_starter):  # noqa: F811
    assert completes(trials) == (True, "")
    (server,) = psutil.Process(own_starter._server.pid).children()
    stop(server)
    assert completes(trials) == (True, "")
    assert own_starter.notes == ["the fork server was stopped: another one is started in its place"]
    gone(trials, [server.pid])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_when_all_of_them_are_stopped_and_the_driver_is_killed_all_are_gone(trials, kind):
    driver, ranks = driven(trials, kind)
    its_own = left_by(psutil.Process(ranks[1]))
    below = psutil.Process(driver.pid).children(recursive=True)
    for process in below:
        if process.pid not in ranks and "resource_tracker" not in " ".join(process.cmdline()):
            stop(process)
    driver.kill()
    driver.join()
    gone(trials, {*(process.pid for process in below), *ranks}, timeout_s=5.0)
    trials.wait_until(lambda: not [path for path in its_own if path.exists()], 5, f"the end of {its_own}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "words"),
    [
        # Stopped again and again, or at work without a step.
        ("subprocess.run(['kill', '-STOP', str(os.getpid())])", "was stopped by SIGSTOP and did not go on"),
        ("time.sleep(1000)", "The profile trial did not end in time. The 0.5 minutes of --max-minutes were over"),
    ],
)
def test_a_program_that_stands_still_costs_no_more_than_the_minutes_of_its_study(tmp_path, home, line, words):
    program = tmp_path / "train.py"
    program.write_text(f"import deepspeed, os, subprocess, time\n{line}\n")
    command = [str(BIN / "zerotune"), "tune", "--max-minutes", "0.5", "--", "deepspeed", "--num_gpus", "1", "train.py"]
    environment = {**os.environ, "XDG_DATA_HOME": str(home)}
    began = time.monotonic()
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1, ended.stderr
    assert time.monotonic() - began < 90
    assert words in ended.stderr
