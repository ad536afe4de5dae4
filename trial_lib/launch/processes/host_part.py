"""One host's part of a trial that spans several: runs DeepSpeed's launcher there, and ends everything that it started.

Runs in the user's environment, on each of the hosts. Its standard input is its leash. It ends when that closes, with
the connection or with the process that holds it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from trial_lib.launch.processes import bootstrap, log_bounds, rank_process
from trial_lib.launch.processes.keeper import Kept, kill_descendants, leave_keeper, wait_on_leash
from trial_lib.launch.processes.leavings import remove_shared_memory
from trial_lib.messages import folders, shared_segments
from trial_lib.messages.files import open_own

RANKS_ENDED, RANK_FAILED, LOST = 0, 1, 2
"""The exit codes: all its ranks have ended well, one has failed, or the guard itself was killed. Any other status, or a
signal, means that the host is gone.
"""


def main(arguments: list[str]) -> None:
    """Entry: reads the host's part from one line, as `trial_lib.launch.hosts` sends it, and runs it."""
    told = json.loads(sys.stdin.buffer.readline())
    segments = shared_segments.segments()

    def clean_up(guard: Kept) -> int:
        remove_shared_memory(told["master_addr"], told["master_port"], segments)
        if told["scratch"]:
            folders.remove(Path(told["scratch"]))
        if told["guard"] is None:
            shutil.rmtree(rank_process.workers_folder(told["environment"], os.getpid()), ignore_errors=True)
        code = os.waitstatus_to_exitcode(guard.status)
        return code if code in (RANKS_ENDED, RANK_FAILED) else LOST

    leave_keeper(clean_up)
    os._exit(_run(told, told["guard"] or os.getppid()))


def _run(told: dict[str, Any], workers_of: int) -> int:
    environment = {**told["environment"], rank_process.WORKERS_OF: str(workers_of)}
    with contextlib.ExitStack() as opened:
        # A launcher that fails to start prints the reason to the log of the host's first rank.
        log = opened.enter_context(open_own(Path(told["log"]), "ab"))
        launcher = subprocess.Popen(
            launcher_command(told), cwd=told["cwd"], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    logs = [Path(log) for log in told["bounded_logs"]]
    status = wait_on_leash(launcher, sys.stdin.fileno(), lambda: log_bounds.bound(logs))
    kill_descendants()
    log_bounds.bound(logs)
    return RANKS_ENDED if status == 0 else RANK_FAILED


def launcher_command(told: dict[str, Any]) -> list[str]:
    """Returns the command that starts this host's ranks: `deepspeed --no_ssh --node_rank N --hostfile ...`."""
    rank = bootstrap.command(told["interpreter"], "trial_lib.launch.processes.rank_process", told["launch"])
    return [
        *(told["interpreter"], "-m", "deepspeed.launcher.runner"),
        *("--hostfile", told["hostfile"], "--no_ssh", "--node_rank", str(told["node_rank"])),
        *("--master_addr", told["master_addr"], "--master_port", told["master_port"]),
        *("--log_level", "critical", "--no_local_rank", "--no_python"),
        *rank,
    ]
