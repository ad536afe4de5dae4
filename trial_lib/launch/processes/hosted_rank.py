"""A process that DeepSpeed's launcher has started becomes a rank of a trial. Runs in the user's environment."""

import json
import os
from pathlib import Path

from trial_lib.launch.processes import rank_process

WORKERS_OF = "ZEROTUNE_WORKERS_OF"
"""The environment variable by which the guard above DeepSpeed's launcher says whose folder the ranks' workers have."""


def main(arguments: list[str]) -> None:
    """Entry: takes its rank from the environment, as the launcher sets it, and all else from the trial's launch file.

    Args:
        arguments: the path of that file (`trial_lib.launch.hosts.starter` writes it).
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
