"""The guard of a trial that spans several hosts. It holds the leash of each host's part and keeps the deadline."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from trial_lib.launch.processes.guard import serve
from trial_lib.messages.files import open_own


def main(arguments: list[str]) -> None:
    """Reads the launch from the driver's socket. Each of its "ranks" is one host's part."""
    serve(arguments, _start_host)


def _start_host(part: dict[str, Any], request: dict[str, Any]) -> subprocess.Popen[bytes]:
    # ssh, or an interpreter that does not start, writes its errors there.
    with open_own(Path(part["log"]), "ab") as log:
        process = subprocess.Popen(part["command"], stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    # This number names the folder of the ranks' workers. This guard removes it here, a part's guard elsewhere.
    told = {**part["told"], "guard": os.getpid() if part["here"] else None}
    try:
        # Every user of the host can read a command line, so the message goes through the pipe.
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        # The part has ended, and its exit status shows why.
        pass
    return process
