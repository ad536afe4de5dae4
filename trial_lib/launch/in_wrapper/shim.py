"""Shims: programs that stand for `sbatch`, `docker` and the like on a wrapper's PATH.

A shim that would start a training elsewhere writes the file that a training writes when it arrives, and waits.
Otherwise it becomes the program that it stands for.
"""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerotune.trial_lib.inputs.elsewhere import OTHER_USER, programs_elsewhere, started_elsewhere
from zerotune.trial_lib.launch.processes import bootstrap

ELSEWHERE = "elsewhere"
"""The key of the words in that file."""
_FOLDER = "shims"


def write_shims(arrived: Path, environment: Mapping[str, str]) -> Path:
    """Writes a shim for each of these programs that the environment has, in a folder beside the file `arrived`."""
    folder = _beside(arrived)
    folder.mkdir()
    for program in (*programs_elsewhere(), *OTHER_USER):
        if shutil.which(program, path=environment.get("PATH", os.defpath)):
            # The user's variables and packages do not reach it.
            python, *words = bootstrap.command(sys.executable, __name__, str(arrived), program)
            shim = folder / program
            shim.write_text(f'#!/bin/sh\nexec {shlex.join([python, "-IS", *words])} "$@"\n')
            shim.chmod(0o755)
    return folder


def without_shims(path: str, arrived: str) -> str:
    """Returns a PATH without the folder of shims beside the file `arrived`."""
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if folder != str(_beside(Path(arrived))))


def _beside(arrived: Path) -> Path:
    return arrived.with_name(_FOLDER)


def main(arguments: Sequence[str]) -> None:
    """Entry: the file that a training writes, and the words of a command."""
    arrived, *words = arguments
    found = started_elsewhere(words)
    if found is None or (found.kind.also_prepares and not found.is_training):
        path = without_shims(os.environ.get("PATH", os.defpath), arrived)
        program = shutil.which(words[0], path=path)
        if program is None:
            sys.exit(f"{words[0]}: not found")
        os.execv(program, list(words))
    own = Path(f"{arrived}.{os.getpid()}")
    own.write_text(json.dumps({ELSEWHERE: words}), encoding="ascii")
    with contextlib.suppress(FileExistsError):
        os.link(own, arrived)
    while True:
        time.sleep(60)
