"""How long a guard waits for killed processes: as long as they end, or memory comes free."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from trial_lib.launch.processes import guard

# Kills a child that lives on for a while, as one does of which a driver has locked much memory.
PROGRAM = """
import subprocess, sys, time
import psutil
from types import SimpleNamespace
from trial_lib.launch.processes import guard

started = time.monotonic()
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1.5)"])
psutil.Process.kill = lambda process: None
comes_free = sys.argv[1] == "comes_free"
def virtual_memory():
    return SimpleNamespace(total=1000, available=100 + comes_free * int(100 * (time.monotonic() - started)))
psutil.virtual_memory = virtual_memory
guard._STUCK_S, guard._MEMORY_LOOK_S = 0.5, 0.05
_, pids = guard.kill_descendants()
print(child.pid in pids, psutil.pid_exists(child.pid))
"""


@pytest.mark.parametrize(("memory", "is_alive"), [("comes_free", False), ("stays", True)])
def test_a_killed_process_is_waited_for_as_long_as_its_memory_comes_free(memory: str, is_alive: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, memory], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", str(is_alive)]


def test_what_others_take_and_give_back_lengthens_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, free = SimpleNamespace(now=0.0), SimpleNamespace(bytes=500)
    monkeypatch.setattr(guard.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=free.bytes))
    patience = guard._Patience()
    over_at = None
    for second in range(100):
        clock.now, free.bytes = float(second), 500 + 10 * (second % 2)
        patience.note(1)
        if patience.is_over():
            over_at = second
            break
    # Once more than ever was free, after the first second.
    assert over_at == 1 + guard._STUCK_S + 1
