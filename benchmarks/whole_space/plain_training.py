"""A training without ZeroTune, timed from outside: the program is not touched."""

import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_EVERY = 5
_A_LOG = re.compile(rb"'loss': ")
_TICKS = os.sysconf("SC_CLK_TCK")


def trained(command: Path, samples_per_step: int, steps: int, environment: Mapping[str, str]) -> dict[str, float]:
    """Trains by the answer's command, with options for a free port, a length, and a log of every five steps.

    The first five steps start everything. The others are timed, from one line of the Trainer's log to the last.

    Args:
        command: `best_command.txt`.
        samples_per_step: the global batch.
        steps: of the training.
        environment: of the user's shell.

    Returns:
        Seconds a sample: by the clock of a rank, and of processor time of all its processes.
    """
    more = ("--max_steps", steps, "--logging_steps", _EVERY, "--disable_tqdm", True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # Other trainings of the machine may have DeepSpeed's own port.
        launcher = f"deepspeed --master_port {free.getsockname()[1]} "
    typed = f"{command.read_text().rstrip().replace('deepspeed ', launcher, 1)} {shlex.join(map(str, more))}"
    logs, tail = [], b""
    with subprocess.Popen(
        ["sh", "-e", "-c", typed], env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            tail = tail[-4000:] + line
            if _A_LOG.search(line):
                logs.append((time.monotonic(), _processor_time(run.pid)))
    assert run.returncode == 0, tail.decode(errors="replace")
    assert len(logs) == steps // _EVERY, tail.decode(errors="replace")
    samples = (steps - _EVERY) * samples_per_step
    wall, processor = (end - start for start, end in zip(logs[0], logs[-1], strict=True))
    # A rank has half of the samples, and every step lasts as long on both.
    return {"wall_s_per_sample_of_a_rank": 2 * wall / samples, "processor_s_per_sample": processor / samples}


def _processor_time(root: int) -> float:
    """Returns the seconds of processor time of a process and all its descendants that live."""
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    family = {root}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds.get(process, 0.0) for process in family)
