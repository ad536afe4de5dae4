"""Turns a process into a rank: its output, its cores, its environment, and its death with its guard."""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from zerotune.trial_lib.launch.processes.watchdog import die_with_parent, workers_folder
from zerotune.trial_lib.messages.files import OWNERS_FILE

# The threads of OpenBLAS, the library in numpy and scipy. It starts them when it is loaded. A fork has none of them.

NUMBER = "OPENBLAS_NUM_THREADS"
"""The environment variable with OpenBLAS's number of threads. It takes precedence over all others."""

_NUMBERS = (NUMBER, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_PREFIXES, _SUFFIXES = ("", "scipy_"), ("", "64_", "_64")  # as its builds name their functions


def start_threads(environment: Mapping[str, str]) -> None:
    """Has each OpenBLAS that was loaded before a fork start the threads that it would start in a new interpreter."""
    number = _number(environment)
    if number == 1:
        return
    for library in _loaded():
        for prefix, suffix in product(_PREFIXES, _SUFFIXES):
            set_number = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if set_number is not None:
                set_number(number)


def _number(environment: Mapping[str, str]) -> int:
    for name in _NUMBERS:
        with contextlib.suppress(KeyError, ValueError):
            if (number := int(environment[name])) > 0:
                return number
    return len(os.sched_getaffinity(0))


def _loaded() -> Iterator[ctypes.CDLL]:
    mapped = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line
    }
    for path in sorted(mapped):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path)


WORKERS_OF = "ZEROTUNE_WORKERS_OF"
"""The environment variable with the process id in the name of the folder of a hosted rank's workers."""

set_by_imports: dict[str, str] = {}
"""Variables that installed modules have set when a fork server imported them. They are not imported again in a rank."""


def become(request: dict[str, Any], rank: int, guard: int, workers_of: int | None = None) -> None:
    """Turns this process into a rank and runs the entry in it."""
    die_with_parent(guard)
    # A program that signals its process group, as its launcher would, does not end the guard and the other ranks.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    own = request["ranks"][rank]
    _redirect(own["log"])
    os.environ.clear()
    os.environ.update({**set_by_imports, **own["environment"]})
    os.chdir(request["cwd"])
    folder = workers_folder(os.environ, guard if workers_of is None else workers_of)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        # Another user may have made it first.
        if folder.stat().st_uid == os.getuid():
            # Every worker inherits it.
            multiprocessing.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]
    if own["cores"]:
        os.sched_setaffinity(0, own["cores"])
    start_threads(os.environ)
    # A fork inherits the state of Python's and numpy's global generators. Cold ranks each have their own seed.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))
    module, function = request["entry"].split(":")
    getattr(importlib.import_module(module), function)(request["payload"], request["first_rank"] + rank)


def _redirect(log: str) -> None:
    # Sends standard output and error to the rank's log, and lets go of the driver's terminal.
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNERS_FILE)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def main(arguments: list[str]) -> None:
    """Entry of a rank in a new interpreter: a cold one by its number, with the launch on standard input; or one that
    DeepSpeed's launcher has started, by the launch file of `zerotune.trial_lib.launch.hosts`.
    """
    if arguments[0].isdecimal():
        become(json.load(sys.stdin), rank=int(arguments[0]), guard=os.getppid())
        return
    launch = json.loads(Path(arguments[0]).read_text())
    rank = int(os.environ["RANK"])
    launch["first_rank"] = 0
    workers_of = int(os.environ.pop(WORKERS_OF))
    own = launch["ranks"][rank]
    environment = dict(os.environ)
    if own["devices"] is not None:
        environment["CUDA_VISIBLE_DEVICES"] = own["devices"]
    launch["ranks"] = {rank: {**own, "environment": environment}}
    become(launch, rank, guard=os.getppid(), workers_of=workers_of)
