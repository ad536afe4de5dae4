"""Killing each process of a trial's tree: nothing stays alive, and the next trial is fine."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import PROGRAMS

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = pytest.mark.alone

SPAWN = multiprocessing.get_context("spawn")
BUILDERS = ["ShareMemCommBuilder"]
SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
ENDLESS = StepWindow(start_step=2, end_step=10**6, max_steps=10**6)


def drive(kind, plan, root):
    """A driver of its own: runs one trial."""
    starter = {
        "warm": lambda: WarmStarter(sys.executable, BUILDERS, rank_environment(), str(root / "server.log"), print),
        "cold": lambda: ColdStarter(sys.executable, BUILDERS, rank_environment(), print),
    }[kind]()
    ThisHost(starter, this_host(), root / "locks").run_trial(plan, threading.Event())


def gone(trials, pids, timeout_s=1.0):
    return trials.wait_until(lambda: not any(trials.is_alive(pid) for pid in pids), timeout_s, f"the end of {pids}")


def started(trials, *arguments, starter="warm", **options):
    running = trials.start(trials.plan("children.py", *arguments, slots=2, **options), starter)
    for rank in range(2):
        running.wait_for("ready", rank)
    assert len(running.pids()) == 6
    return running


def ranks_of(running):
    """Returns the process ids of rank 0 and rank 1: each prints its grandchild's, then its own, then its child's."""
    return [running.pids()[1], running.pids()[4]]


def outside_trials():
    """Returns what is there of trials outside their folders."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    return {*temporary.glob("zerotune-workers-*"), *Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


def completes(trials, starter="warm"):
    result = trials.run("plain.py", slots=2, window=SHORT, starter=starter)
    return result.outcome == "completed", result.reason


def driven(trials, kind):
    """Returns a driver whose trial's ranks run, and the process ids that these have printed."""
    plan = trials.plan("children.py", "--hang", "spin", slots=2)
    driver = SPAWN.Process(target=drive, args=(kind, plan, trials.root))
    driver.start()
    logs = [plan.paths.log(rank) for rank in range(2)]
    trials.wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 120, "the ranks")
    ranks = [int(line.split()[1]) for log in logs for line in log.read_text().splitlines() if line.startswith("pid ")]
    assert len(ranks) == 6
    assert {pid for pid in ranks if trials.is_alive(pid)} == set(ranks)
    return driver, ranks


def alive_when_all_slots_are_free(trials, pids):
    """Waits until the host's slots can be had, and returns which processes still live then."""
    host = this_host()
    with held_slots(trials.lock_dir, host, len(host.slots), lambda: False):
        return {pid for pid in pids if trials.is_alive(pid)}


@pytest.mark.parametrize("kind", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_when_the_driver_is_killed_all_it_started_is_gone_within_a_second(trials, kind):
    driver, ranks = driven(trials, kind)
    below = [process.pid for process in psutil.Process(driver.pid).children(recursive=True)]
    os.kill(driver.pid, signal.SIGKILL)
    gone(trials, {*below, *ranks})
    driver.join()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_rank_is_a_crash_that_takes_its_peers_along(trials, victim):
    running = started(trials, window=ENDLESS)
    pids = running.pids()
    os.kill(ranks_of(running)[victim], signal.SIGKILL)
    result = running.result()
    assert result.outcome == "crashed"
    assert f"Rank {victim} was killed by SIGKILL" in result.reason
    assert not any(trials.is_alive(pid) for pid in pids)
    assert completes(trials) == (True, "")


@pytest.mark.long
def test_peers_that_hang_after_a_rank_was_killed_are_ended(trials):
    running = started(trials, "--hang", "sleep")
    pids, killed_at = running.pids(), time.monotonic()
    os.kill(ranks_of(running)[1], signal.SIGKILL)
    result = running.result()
    assert time.monotonic() - killed_at < 8
    assert result.outcome == "crashed"
    assert "Rank 1 was killed by SIGKILL" in result.reason
    assert not any(trials.is_alive(pid) for pid in pids)


def test_a_guard_takes_no_time_from_its_ranks_while_they_train(trials):
    running = started(trials, "--hang", "spin")
    guard = psutil.Process(ranks_of(running)[0]).parent()
    woken = guard.num_ctx_switches().voluntary
    time.sleep(1)
    assert guard.num_ctx_switches().voluntary - woken <= 2
    running.cancel()
    assert running.result().outcome == "cancelled"


@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_killed_guard_is_a_crash_and_leaves_no_rank_and_no_file(trials, starter):
    before = outside_trials()
    running = started(trials, "--hang", "spin", starter=starter)
    pids, ranks = running.pids(), ranks_of(running)
    guard = psutil.Process(ranks[0]).ppid()
    assert psutil.Process(ranks[1]).ppid() == guard
    its_own = outside_trials() - before
    assert [path.name for path in its_own if path.is_dir()] == [f"zerotune-workers-{guard}"]
    assert sum(path.parent == Path("/dev/shm") for path in its_own) == 2
    os.kill(guard, signal.SIGKILL)
    result = running.result()
    assert result.outcome == "crashed"
    assert "guard" in result.reason
    gone(trials, pids)
    assert not its_own & outside_trials()
    assert completes(trials) == (True, "")


@pytest.mark.long
@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_killed_guard_s_slots_are_free_when_no_rank_is_left_and_then_at_once(trials, starter):
    running = started(trials, "--hang", "spin", starter=starter)
    pids, killed_at = running.pids(), time.monotonic()
    psutil.Process(ranks_of(running)[0]).parent().kill()
    assert alive_when_all_slots_are_free(trials, pids) == set()
    assert time.monotonic() - killed_at < 2
    assert running.result().outcome == "crashed"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_so_they_are_when_the_driver_is_killed_with_it(trials, kind):
    driver, pids = driven(trials, kind)
    guard = psutil.Process(pids[1]).parent()
    driver.kill()
    guard.kill()
    assert alive_when_all_slots_are_free(trials, pids) == set()
    driver.join()


@pytest.fixture
def own_starter(trials, tmp_path):
    """A warm starter of this test's own; its notes are in `notes`."""
    notes = []
    starter = WarmStarter(sys.executable, BUILDERS, rank_environment(), str(tmp_path / "server.log"), notes.append)
    starter.notes = notes
    trials._starter = lambda name: starter
    yield starter
    starter.close()


@pytest.mark.long
def test_a_killed_fork_server_costs_the_running_trial_nothing_and_is_started_anew(trials, own_starter):
    running = trials.start(trials.plan("slow_data.py", window=StepWindow(2, 150, max_steps=149)))
    trials.wait_until(lambda: running.plan.paths.log(0).exists(), 60, "the rank")
    (server,) = psutil.Process(own_starter._server.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    second = trials.start(trials.plan("plain.py", window=SHORT))
    assert second.result().outcome == "completed"
    first = running.result()
    assert first.outcome == "completed", first.reason
    assert first.metrics["measured_steps"] == 149
    assert own_starter.notes == []


@pytest.mark.long
def test_a_server_that_has_got_a_thread_does_not_fork_and_says_so(trials, own_starter, tmp_path, monkeypatch):
    # Imported while priming; starts its thread only when it is told to.
    (tmp_path / "starts_a_thread.py").write_text(
        "import signal, threading, time\n"
        "def start(*_): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)\n"
    )
    own_starter._environment["PYTHONPATH"] = str(tmp_path)
    own_starter.start()
    own_starter.prime(["starts_a_thread"])
    assert completes(trials) == (True, "")
    assert own_starter.notes == []
    (watchdog,) = psutil.Process(own_starter._server.pid).children()
    os.kill(watchdog.pid, signal.SIGUSR1)
    trials.wait_until(lambda: watchdog.num_threads() == 2, 5, "the thread")
    assert completes(trials) == (True, "")
    # The system names it after its process.
    assert own_starter.notes == ["starting cold: the fork server has 2 threads (python) (docs/operations.md)"]
    # It would only hold memory beside the trials.
    assert own_starter._server is None


@pytest.mark.long
def test_a_module_that_starts_a_thread_is_left_to_the_trials_with_what_imports_it_and_no_other(
    trials, own_starter, tmp_path
):
    (tmp_path / "has_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    # As optional imports are written: it must not be taken for missing.
    (tmp_path / "uses_it.py").write_text(
        "try:\n    import has_a_thread\nexcept ImportError:\n    has_a_thread = None\n"
    )
    (tmp_path / "harmless.py").write_text("import os\nimported_by = os.getpid()\n")
    (tmp_path / "imports.py").write_text(
        "import os, runpy, sys, harmless, uses_it\n"
        "print('primed:', harmless.imported_by != os.getpid(), 'thread:', uses_it.has_a_thread is not None)\n"
        f"sys.path.insert(0, '{PROGRAMS}')\n"
        f"runpy.run_path('{PROGRAMS}/plain.py', run_name='__main__')\n"
    )
    own_starter._environment["PYTHONPATH"] = str(tmp_path)
    own_starter.start()
    own_starter.prime(["uses_it", "harmless"])
    (note,) = own_starter.notes
    assert "could not fork with has_a_thread: these and what imports them are paid in each trial" in note
    result = trials.run(str(tmp_path / "imports.py"), window=SHORT)
    assert result.outcome == "completed", result.reason
    assert "primed: True thread: True" in trials.log(result)
    assert own_starter.notes == [note]


@pytest.mark.long
def test_where_too_many_modules_start_a_thread_none_is_primed(trials, own_starter, tmp_path):
    names = [f"threaded_{number}" for number in range(7)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        )
    own_starter._environment["PYTHONPATH"] = str(tmp_path)
    own_starter.start()
    own_starter.prime(names)
    (note,) = own_starter.notes
    assert "these and all of the code's imports are paid in each trial" in note
    assert completes(trials) == (True, "")
    assert own_starter.notes == [note]


@pytest.mark.long
def test_closing_does_not_wait_for_a_server_that_still_primes(trials, own_starter):
    running = trials.start(trials.plan("plain.py"))
    trials.wait_until(lambda: own_starter._server is not None, 10, "the server")
    server, closed_at = own_starter._server.pid, time.monotonic()
    own_starter.close()
    assert running.result().outcome == "cancelled"
    assert time.monotonic() - closed_at < 2
    assert not trials.is_alive(server)


@pytest.mark.long
def test_twenty_warm_trials_leak_no_descriptor_no_process_and_no_thread(trials, warm_starter):
    assert completes(trials) == (True, "")
    server = psutil.Process(warm_starter._server.pid).children()[0]

    def held():
        trials.wait_until(lambda: len(server.children()) == 0, 5, "the last guard")
        mine = psutil.Process()
        return {
            "driver's files": mine.num_fds(),
            "driver's children": len(mine.children(recursive=True)),
            "server's files": server.num_fds(),
            "server's threads": server.num_threads(),
        }

    before = held()
    for _ in range(20):
        assert trials.run("plain.py", window=SHORT).outcome == "completed"
    assert held() == before
