"""Builds DeepSpeed's ops on a host, and ends everything that it started when no process waits for them any more.

Its standard input is its leash. It ends when that closes, with the connection or with
the process that holds it. Its standard output has the report of `jit_builds`.
"""

import contextlib
import json
import os
import subprocess
import sys

from trial_lib.launch.processes import bootstrap
from trial_lib.launch.processes.keeper import kill_descendants, leave_keeper, wait_on_leash

# The profile trial may run meanwhile. Its ranks need little of the processor, but without delay.
_NICE = 10


def main(arguments: list[str]) -> None:
    """Entry: reads `interpreter`, `environment` and `builders` from one line, and builds."""
    told = json.loads(sys.stdin.buffer.readline())
    # The driver handles the terminal's Ctrl-C. A process that ssh starts may lead a session already.
    with contextlib.suppress(PermissionError):
        os.setsid()
    leave_keeper(lambda _: 0)
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
    wait_on_leash(building, sys.stdin.fileno())
    kill_descendants()
    os._exit(0)
