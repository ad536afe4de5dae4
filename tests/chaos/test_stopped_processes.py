"""Stopping each process that guards a trial, as SIGSTOP does: what it guards ends all the same, and leaves nothing."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from test_launch_chaos import completes, driven, gone, own_launcher, ranks_of, started  # noqa: F401


def stop(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def left_by(rank: psutil.Process) -> list[Path]:
    """Returns what a rank's trial has outside its folder: the folder of its workers, and its buffers."""
    mapped = {Path(mapping.path) for mapping in rank.memory_maps()}
    buffers = [path for path in mapped if path.name.startswith("deepspeed_allreduce_buffer_")]
    return [Path(os.environ.get("TMPDIR") or "/tmp", f"zerotune-workers-{rank.ppid()}"), *buffers]


def test_a_stopped_guard_does_not_hold_up_a_cancelled_trial_and_nothing_is_left(trials):
    running = started(trials, "--hang", "spin")
    pids, rank = running.pids(), psutil.Process(ranks_of(running)[0])
    its_own = left_by(rank)
    assert len(its_own) > 1
    assert all(path.exists() for path in its_own)
    stop(rank.parent())
    running.cancel()
    assert running.result().outcome == "cancelled"
    gone(trials, pids)
    assert not [path for path in its_own if path.exists()]


def test_a_keeper_that_stays_stopped_is_woken_when_its_trial_has_ended(trials):
    running = started(trials, "--hang", "spin")
    rank = psutil.Process(ranks_of(running)[0])
    guard, keeper = rank.parent(), rank.parent().parent()
    stop(keeper)
    running.cancel()
    assert running.result().outcome == "cancelled"
    gone(trials, [*running.pids(), guard.pid, keeper.pid])


def test_a_guard_and_its_keeper_that_are_stopped_do_not_hold_up_a_cancelled_trial_and_nothing_is_left(trials):
    running = started(trials, "--hang", "spin")
    rank = psutil.Process(ranks_of(running)[0])
    its_own, guard, keeper = left_by(rank), rank.parent(), rank.parent().parent()
    stop(guard)
    stop(keeper)
    running.cancel()
    assert running.result().outcome == "cancelled"
    gone(trials, [*running.pids(), guard.pid, keeper.pid])
    assert not [path for path in its_own if path.exists()]


@pytest.mark.long
def test_a_guard_and_its_keeper_that_stay_stopped_cost_their_trial_which_says_so(trials):
    running = started(trials, "--hang", "spin")
    rank = psutil.Process(ranks_of(running)[0])
    its_own, guard, keeper = left_by(rank), rank.parent(), rank.parent().parent()
    stop(guard)
    stop(keeper)
    result = running.result()
    assert (result.outcome, result.from_outside) == ("crashed", True)
    assert "guard" in result.reason
    gone(trials, [*running.pids(), guard.pid, keeper.pid])
    assert not [path for path in its_own if path.exists()]


@pytest.mark.long
def test_a_guard_that_stays_stopped_costs_its_trial(trials):
    running = started(trials, "--hang", "spin")
    pids = running.pids()
    stop(psutil.Process(ranks_of(running)[0]).parent())
    result = running.result()
    assert (result.outcome, result.from_outside) == ("crashed", True)
    assert "guard" in result.reason
    gone(trials, pids)


@pytest.mark.long
def test_a_fork_server_that_stays_stopped_is_replaced_and_that_is_told(trials, own_launcher):  # noqa: F811
    assert completes(trials) == (True, "")
    (server,) = psutil.Process(own_launcher._server.pid).children()
    stop(server)
    assert completes(trials) == (True, "")
    assert own_launcher.notes == ["the fork server was stopped: another one is started in its place"]
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
