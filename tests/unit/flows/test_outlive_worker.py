"""A deployed run goes on when nobody reads what it prints any more."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, time
from prefect.runtime import deployment
from zerotune.tasks import cancellation
from rich.console import Console
if sys.argv[1] == "deployed":
    cancellation.deployment = type("Deployed", (), {"id": "1"})
cancellation.outlive_worker()
time.sleep(0.5)
Console(stderr=True).print("nobody reads this")
print("nor this", flush=True)
open(sys.argv[2], "w").write("went on")
"""


@pytest.mark.long
def test_a_deployed_run_goes_on_when_its_worker_has_died_and_another_command_ends_as_usual(tmp_path):
    for kind, goes_on in (("deployed", True), ("typed", False)):
        reader, writer = os.pipe()
        went_on = tmp_path / kind
        words = [sys.executable, "-c", PROGRAM, kind, str(went_on)]
        with subprocess.Popen(words, stdout=writer, stderr=writer) as process:
            os.close(writer)
            os.close(reader)
        assert (process.returncode == 0) == goes_on
        assert went_on.exists() == goes_on
