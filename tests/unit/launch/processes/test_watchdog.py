"""A watchdog kills all behind a killed process, and waits for the killed as long as they end or memory comes free."""

import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from zerotune.trial_lib.launch.processes import watchdog

# Kills a child that lives on for a while, as one does of which a driver has locked much memory.
PROGRAM = """
import subprocess, sys, time
import psutil
from types import SimpleNamespace
from zerotune.trial_lib.launch.processes import watchdog

started = time.monotonic()
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1.5)"])
psutil.Process.kill = lambda process: None
comes_free = sys.argv[1] == "comes_free"
def virtual_memory():
    return SimpleNamespace(total=1000, available=100 + comes_free * int(100 * (time.monotonic() - started)))
psutil.virtual_memory = virtual_memory
watchdog._STUCK_S, watchdog._MEMORY_LOOK_S = 0.5, 0.05
_, pids = watchdog.kill_descendants()
print(child.pid in pids, psutil.pid_exists(child.pid))
"""


# Leaves a watchdog, and starts a child in a session of its own. What it prints are process ids, and how it ended.
KEPT = """
import os, signal, subprocess, sys, time
from zerotune.trial_lib.launch.processes.watchdog import leave_watchdog

def clean_up(kept):
    print(kept.pid, kept.status, *kept.pids, flush=True)
    return 7

leave_watchdog(clean_up, survives_watchdog=sys.argv[1] == "survives")
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def kept(word: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", KEPT, word], stdout=subprocess.PIPE, text=True)


def pids_of(watchdog: "subprocess.Popen[str]") -> list[int]:
    assert watchdog.stdout is not None
    return [int(word) for word in watchdog.stdout.readline().split()]


def has_ended(pid: int, within_s: float) -> bool:
    """Returns whether a process, of which this one is no parent, ends in time."""
    watch = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    ended = bool(poll.poll(within_s * 1000))
    os.close(watch)
    return ended


def test_a_killed_process_leaves_nothing_alive_and_its_watchdog_cleans_up() -> None:
    watchdog = kept("dies")
    process, child = pids_of(watchdog)
    os.kill(process, signal.SIGKILL)
    assert pids_of(watchdog) == [process, signal.SIGKILL, child]
    assert watchdog.wait() == 7
    assert not psutil.pid_exists(child)


def test_a_process_dies_with_its_watchdog() -> None:
    watchdog = kept("dies")
    process, child = pids_of(watchdog)
    watchdog.kill()
    assert has_ended(process, 10)
    os.kill(child, signal.SIGKILL)


def test_a_process_that_survives_its_watchdog_goes_on() -> None:
    watchdog = kept("survives")
    process, child = pids_of(watchdog)
    watchdog.kill()
    watchdog.wait()
    assert not has_ended(process, 0.5)
    for pid in (process, child):
        os.kill(pid, signal.SIGKILL)


def test_the_tie_ends_a_wait_and_so_does_the_end_of_the_process() -> None:
    ours, theirs = os.pipe()
    sleeping = subprocess.Popen(["sleep", "60"])
    os.close(theirs)
    assert watchdog.wait_while_tied(sleeping, ours) is None
    sleeping.kill()
    sleeping.wait()
    ours, theirs = os.pipe()
    assert watchdog.wait_while_tied(subprocess.Popen(["false"]), ours) == 1


def test_without_children_it_looks_at_no_process_and_returns_those_that_have_ended() -> None:
    program = (
        "import os, time\n"
        "from zerotune.trial_lib.launch.processes import watchdog\n"
        "watchdog.become_subreaper()\n"
        "looks, watchdog.psutil.Process = watchdog.psutil.Process, None\n"
        "print(watchdog.kill_descendants()[1])\n"
        "watchdog.psutil.Process = looks\n"
        "child = os.fork()\n"
        "if not child: os._exit(0)\n"
        "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
        "print(watchdog.kill_descendants()[1] == {child})\n"
        "print(watchdog.kill_descendants()[1])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["set()", "True", "set()"]


@pytest.mark.parametrize(("memory", "is_alive"), [("comes_free", False), ("stays", True)])
def test_a_killed_process_is_waited_for_as_long_as_its_memory_comes_free(memory: str, is_alive: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, memory], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", str(is_alive)]


def test_what_others_take_and_give_back_lengthens_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, free = SimpleNamespace(now=0.0), SimpleNamespace(bytes=500)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=free.bytes))
    patience = watchdog._Patience()
    over_at = None
    for second in range(100):
        clock.now, free.bytes = float(second), 500 + 10 * (second % 2)
        patience.note(1)
        if patience.is_over():
            over_at = second
            break
    # Once more than ever was free, after the first second.
    assert over_at == 1 + watchdog._STUCK_S + 1
