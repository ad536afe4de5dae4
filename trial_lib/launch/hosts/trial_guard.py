"""The guard of a trial that spans several hosts: holds the leash of each host's part, keeps the deadline."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from trial_lib.launch.processes.guard import serve
from trial_lib.wire.whole_files import open_own


def main(arguments: list[str]) -> None:
    """Entry: reads the launch from the driver's socket; a "rank" of it is one host's part."""
    serve(arguments, _start_host)


def _start_host(part: dict[str, Any], request: dict[str, Any]) -> subprocess.Popen[bytes]:
    # What ssh or an interpreter that does not come up says.
    with open_own(Path(part["log"]), "ab") as log:
        process = subprocess.Popen(part["command"], stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    # By its name the folder of the ranks' workers is found: this guard removes it here, a part's own elsewhere.
    told = {**part["told"], "guard": os.getpid() if part["here"] else None}
    try:
        # By the pipe and not by the command line, which everybody on the host can read.
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        # It has ended already, and says so by its status.
        pass
    return process
