"""Builds DeepSpeed's ops on a host, and ends all that it started when nobody waits for them any more.

Runs in the user's environment. Its standard input is its leash: it ends when that closes, with the connection or with
the process that holds it. Standard output has what is to be said, as `jit_builds` reports it.
"""

import contextlib
import json
import os
import select
import subprocess
import sys

from trial_lib.launch.processes import bootstrap, rank_process
from trial_lib.launch.processes.guard import become_subreaper, kill_descendants

_POLL_MS = 200
# The profile trial may run meanwhile, whose ranks need little of the processor and that at once.
_NICE = 10


def main(arguments: list[str]) -> None:
    """Entry: reads one line, `interpreter`, `environment` and `builders`, and has them built."""
    told = json.loads(sys.stdin.buffer.readline())
    # The terminal's Ctrl-C is the driver's to hear; what ssh starts may lead a session already.
    with contextlib.suppress(PermissionError):
        os.setsid()
    become_subreaper()
    rank_process.go_on_without_parent(os.getppid())
    keeper = os.getpid()
    guard = os.fork()
    if guard:
        # Stays behind as the guard's parent: when the guard is killed, what it has started comes here.
        os.waitpid(guard, 0)
        kill_descendants()
        return
    rank_process.die_with_parent(keeper)
    become_subreaper()
    os.nice(_NICE)
    report = os.dup(1)
    building = subprocess.Popen(
        bootstrap.command(
            told["interpreter"], "trial_lib.launch.processes.jit_builds", "--report", str(report), *told["builders"]
        ),
        pass_fds=[report],
        env=told["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    leash = select.poll()
    leash.register(sys.stdin.fileno(), select.POLLIN)
    while building.poll() is None and not leash.poll(_POLL_MS):
        pass
    kill_descendants()
    os._exit(0)
