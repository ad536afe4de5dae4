"""Turns a process of DeepSpeed's launcher into a rank of a trial. Runs in the user's environment."""

import json
import os
from pathlib import Path

from trial_lib.launch.processes import rank_process

WORKERS_OF = "ZEROTUNE_WORKERS_OF"
"""The environment variable with the process id in the name of the folder of the ranks' workers."""


def main(arguments: list[str]) -> None:
    """Entry: reads its rank from the launcher's environment, and everything else from the trial's launch file.

    Args:
        arguments: the path of that file, which `trial_lib.launch.hosts.starter` writes.
    """
    launch = json.loads(Path(arguments[0]).read_text())
    rank = int(os.environ["RANK"])
    launch["first_rank"] = 0
    workers_of = int(os.environ.pop(WORKERS_OF))
    own = launch["ranks"][rank]
    environment = dict(os.environ)
    if own["devices"] is not None:
        environment["CUDA_VISIBLE_DEVICES"] = own["devices"]
    launch["ranks"] = {rank: {**own, "environment": environment}}
    rank_process.become(launch, rank, guard=os.getppid(), workers_of=workers_of)
