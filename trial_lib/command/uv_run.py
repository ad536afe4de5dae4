"""`uv run`: a command in the environment of a uv project. uv itself says which Python that is."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_lib.command.ask import ask
from trial_lib.command.launchers import NONE, UserLauncher, launcher_of_program
from trial_lib.command.parse_command import parse_command
from trial_lib.command.read_options import read_options
from trial_lib.command.words import Words
from trial_lib.wire.errors import InputError

_QUESTION = "import sys; print(sys.executable); print(sys.prefix if sys.prefix != sys.base_prefix else '')"
# uv may have to install the project first.
_LONGEST_ANSWER_S = 1800.0
_TRY_IT = "Try the command without zerotune."
_SYNC = "Add its requirements to the project (`uv add`), so that they are in the project's environment."
_ENV_FILE = "UV_ENV_FILE"
# A script's own requirements begin with this line (PEP 723).
_OWN_REQUIREMENTS = re.compile(rb"^# /// script\s*$", re.MULTILINE)


def read_uv_run(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] command` behind `uv run`. uv brings the project's environment up to date.

    Raises:
        InputError: uv refuses its options, would make an environment for this run alone, or starts no training.
    """
    program = words.program
    typed = list(words.rest)
    options = read_options(words, launcher.shown, launcher.options, last=("--module", "--"))
    # These options go to uv again. The flag for a module belongs to the command.
    own = [word for word in typed[: len(typed) - len(words.rest)] if word not in ("-m", "--module", "--")]
    if words.environment.get(_ENV_FILE):
        raise words.error(f"{_ENV_FILE} is set, and ZeroTune reads no such file.", "Export its variables instead.")
    words.rest = _python_first(words.rest, "--module" in options)
    if not words:
        raise words.error("uv run names no command.")
    _refuse_own_requirements(words)
    inner_launcher = launcher_of_program(Path(words.first).name)
    if inner_launcher is not None and inner_launcher.runs_command:
        raise words.error(
            f"uv run starts {inner_launcher.shown}.", f"Write `{inner_launcher.shown} OPTIONS uv run ...` instead."
        )
    python, prefix = _ask(words, [program, "run", *own])
    words.rest[0] = _within(python, words.first, words.environment.get("PATH"))
    words.notes.append(f"uv run is left out: the ranks run with {python}.")
    inner = parse_command(words)
    variables = {"VIRTUAL_ENV": prefix} if prefix else {}
    return {**inner, "launcher_environment": {**inner.get("launcher_environment", {}), **variables}}


def command_within(words: Sequence[str], launcher: UserLauncher) -> list[str] | None:
    """Returns the command that `uv run` starts. None if its options cannot be followed."""
    inner = Words(list(words[len(launcher.shown.split()) :]), "the command", follows=True)
    try:
        options = read_options(inner, launcher.shown, launcher.options, last=("--module", "--"))
    except InputError:
        return None
    return _python_first(inner.rest, "--module" in options) or None


def _python_first(rest: list[str], is_module: bool) -> list[str]:
    """Returns the words behind uv's options, with the `python` that uv puts in front of a script or a module."""
    if is_module:
        return ["python", "-m", *rest]
    return ["python", *rest] if rest and rest[0].endswith(".py") else rest


def _refuse_own_requirements(words: Words) -> None:
    if words.first not in NONE.programs or len(words.rest) < 2:
        return
    script = words.folder / words.rest[1]
    if script.is_file() and _OWN_REQUIREMENTS.search(script.read_bytes()):
        raise words.error(f"{words.rest[1]} lists requirements of its own, which uv installs apart.", _SYNC)


def _within(python: str, program: str, path: str | None) -> str:
    """Returns a program as uv finds it: in the environment, or else by PATH."""
    if program in NONE.programs:
        return python
    if os.sep in program:
        return program
    folder = os.path.dirname(python)  # noqa: PTH120 - the folder of the environment's links, not of their target
    return shutil.which(program, path=os.pathsep.join([folder, path or os.defpath])) or program


def _ask(words: Words, uv_run: list[str]) -> tuple[str, str]:
    """Returns the Python of the environment, and the environment's folder, or "" if it is no virtual one."""
    try:
        asked = ask(words, [*uv_run, "python", "-c", _QUESTION], _LONGEST_ANSWER_S)
    except OSError as error:
        raise words.error(f"{uv_run[0]} cannot be started ({error.strerror}).", "Install uv.") from None
    except subprocess.TimeoutExpired:
        raise words.error("uv run has not started Python within half an hour.", _TRY_IT) from None
    answer = asked.stdout.splitlines()
    if asked.returncode != 0 or len(answer) < 2:
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise words.error(f"uv run cannot be asked for its environment ({last}).", _TRY_IT)
    return answer[-2], answer[-1]
