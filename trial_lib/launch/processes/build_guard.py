"""Builds DeepSpeed's ops on a host, and ends all that it started when nobody waits for them any more.

Runs in the user's environment. Its standard input is its leash: it ends when that closes, with the connection or with
the process that holds it. Standard output has what is to be said, as `jit_builds` reports it.
"""

import contextlib
import json
import os
import subprocess
import sys

from trial_lib.launch.processes import bootstrap
from trial_lib.launch.processes.keeper import kill_descendants, leave_keeper, wait_on_leash

# The profile trial may run meanwhile, whose ranks need little of the processor and that at once.
_NICE = 10


def main(arguments: list[str]) -> None:
    """Entry: reads one line, `interpreter`, `environment` and `builders`, and has them built."""
    told = json.loads(sys.stdin.buffer.readline())
    # The terminal's Ctrl-C is the driver's to hear; what ssh starts may lead a session already.
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
