"""Runs a program as Python would: an entry of the fork server's, without a word of ZeroTune."""

import os
import runpy
import sys
from typing import Any


def run(payload: dict[str, Any], rank: int) -> None:
    """Runs the script of a payload with its arguments."""
    sys.argv = [payload["script"], *payload["arguments"]]
    sys.path.insert(0, "")
    runpy.run_path(payload["script"], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)
