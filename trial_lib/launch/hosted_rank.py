"""A process that DeepSpeed's launcher has started becomes a rank of a trial. Runs in the user's environment."""

import json
import os
from pathlib import Path

from trial_lib.launch import rank_process


def main(arguments: list[str]) -> None:
    """Entry: takes its rank from the environment, as the launcher sets it, and all else from the trial's launch file.

    Args:
        arguments: the path of that file (`trial_lib.launch.hostfile` writes it).
    """
    launch = json.loads(Path(arguments[0]).read_text())
    rank = int(os.environ["RANK"])
    launch["first_rank"] = 0
    launch["ranks"] = {rank: {**launch["ranks"][rank], "environment": dict(os.environ)}}
    rank_process.become(launch, rank, guard=os.getppid())
