"""A wrapper once more: for a trial that changes a file of the wrapper's, and for the answer in the user's own words.

The answer is `./swift sft`, and not the torchrun that it starts. A wrapper may check or change what it is given. So its
words are the answer only if they come to the launch of the trials.
"""

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from trial_lib.deepspeed_config.overrides import setting_at
from trial_lib.inputs.entrypoint import Entrypoint
from trial_lib.inputs.places import in_wrapper
from trial_lib.inputs.trial_command import trial_command
from trial_lib.inputs.words import ASSIGNMENT
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import write_all
from trial_lib.messages.secrets import redact
from trial_lib.study.followed import followed

_LONGEST_S, _LONGEST_OF_VALUE_S = 30.0, 180.0
# A shell sets these by itself, or an environment that it has activated does.
_OF_EVERY_SHELL = (
    *("_", "PWD", "OLDPWD", "SHLVL", "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TMPDIR"),
    *("TZ", "PS1", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"),
)
_STARTS = ("LC_", "CONDA", "XDG_")


def rewrapped(
    entrypoint: Entrypoint,
    config_path: Path,
    arg_mappings: Mapping[Any, str],
    config_values: Mapping[str, Any],
    folder: Path,
    check: Callable[[], None] = lambda: None,
) -> tuple[Entrypoint, Mapping[Any, str]]:
    """The command that the wrapper starts from copies of its files with other values, and the other mappings.

    The wrapper runs once more for values that it has not been given yet. The arguments are those of `trial_command`,
    and `check` is called repeatedly while the wrapper runs. Raises InputError if with these values the wrapper starts
    another command, or none, and TimeoutError if it starts nothing for long.
    """
    of_wrapper = in_wrapper(arg_mappings, entrypoint.arguments, entrypoint.wrapper, folder)
    if not of_wrapper:
        return entrypoint, arg_mappings
    update = {"arguments": entrypoint.wrapper, "config_positions": (), "config_variables": ()}
    command = trial_command(entrypoint.model_copy(update=update), config_path, of_wrapper, config_values, {}, folder)
    write_all(command.files)
    values = tuple((key, setting_at(config_values, key)) for key in sorted(of_wrapper))
    others = {key: target for key, target in arg_mappings.items() if str(key) not in of_wrapper}
    arguments = _started(entrypoint, command.arguments, values, folder, check)
    return entrypoint.model_copy(update={"arguments": arguments}), others


_seen: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _started(
    entrypoint: Entrypoint, words: Sequence[str], values: tuple[Any, ...], folder: Path, check: Callable[[], None]
) -> tuple[str, ...]:
    key = (entrypoint.wrapper, values, folder)
    if key not in _seen:
        in_time = _within(_LONGEST_OF_VALUE_S, " ".join(entrypoint.wrapper), check)
        now = _split(followed(words, folder, lambda sentence: None, in_time).words)[1]
        count = len(entrypoint.launcher)
        if now[:count] != list(entrypoint.launcher) or len(now) != count + len(entrypoint.arguments):
            raise InputError(
                f"it starts another command with {', '.join(f'{name}={value}' for name, value in values)}.",
                where=" ".join(entrypoint.wrapper),
                remedy="Leave the mapping of its file out.",
            )
        _seen[key] = tuple(now[count:])
    return _seen[key]


def wrapped_command(
    entrypoint: Entrypoint,
    changed: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The line that trains with the answer; empty if the wrapper hands its last words over changed.

    `changed` are the program's arguments with the answer. What the wrapper sets by itself of `variables` is not typed.
    `environment` is what this process began with. None looks it up.
    """
    wrapper, arguments = entrypoint.wrapper, entrypoint.arguments
    kept = len(wrapper) - len(arguments)
    if not arguments or wrapper[kept:] != arguments:
        return ""
    began = psutil.Process().environ() if environment is None else environment
    by_wrapper, trained = entrypoint.environment, {**entrypoint.environment, **variables}
    own = {name: value for name, value in variables.items() if by_wrapper.get(name) != value}
    typed = {**_typed_before(began, str(entrypoint.slots)), **own}
    words = [*(f"{name}={value}" for name, value in typed.items()), *wrapper[:kept], *changed]
    assigned = [f"{name}={value}" for name, value in trained.items()]
    is_same = _comes_to(words, [*assigned, *entrypoint.launcher, *changed], folder, began)
    return " ".join(map(_quoted, words)) if is_same else ""


def _comes_to(words: Sequence[str], expected: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bool:
    in_time = _within(_LONGEST_S, " ".join(words))
    try:
        found = followed(words, folder, lambda sentence: None, in_time, environment=environment)
    except (InputError, TimeoutError, OSError):
        return False
    was, now = _split(expected), _split(found.words)
    return found.folder == folder and was[1] == now[1] and was[0] <= now[0]


def _within(seconds: float, wrapper: str, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    # A check that ends the waiting for a wrapper after some seconds, or as another check does.
    end = time.monotonic() + seconds

    def in_time() -> None:
        check()
        if time.monotonic() > end:
            raise TimeoutError(f"{wrapper} has started no training within {seconds:.0f} s.")

    return in_time


def _split(words: Sequence[str]) -> tuple[set[str], list[str]]:
    # The assignments before a command, and its other words.
    begin = next((place for place, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
    return set(words[:begin]), list(words[begin:])


def _typed_before(began: Mapping[str, str], ranks: str) -> dict[str, str]:
    """The variables, without secrets, that a later shell may lack.

    They were set for this command or by its shell, or have the number of ranks.
    """
    try:
        before = psutil.Process(os.getppid()).environ()
    except psutil.Error:
        before = {}
    set_ = {
        name: value
        for name, value in began.items()
        if (value == ranks or (before and before.get(name) != value))
        # A shell's function is no assignment.
        and ASSIGNMENT.fullmatch(f"{name}=")
        and name not in _OF_EVERY_SHELL
        and not name.startswith(_STARTS)
    }
    shown = redact(set_)
    return {name: value for name, value in set_.items() if shown[name] == value}


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and ASSIGNMENT.match(word) else shlex.quote(word)
