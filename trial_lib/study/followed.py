"""Following a wrapper: ZeroTune runs it up to the launcher, and tunes the command that it starts."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.inputs.elsewhere import StartedElsewhere, started_elsewhere
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.launchers import (
    is_python,
    launcher_in,
    launcher_of,
    launcher_of_program,
    launchers_listed,
    python_target,
)
from zerotune.trial_lib.inputs.places import FileTarget, in_wrapper, trial_command
from zerotune.trial_lib.inputs.program_code import command_within, may_start_ranks, module_file
from zerotune.trial_lib.inputs.words import ASSIGNMENT
from zerotune.trial_lib.launch.wrapper import Launch, NoLaunch, follow_wrapper
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_all
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.search.knobs import get_knob

_WHERE = "the command"
_LONGEST_SHOWN = 60
_QUICK_S = 60.0
_INSTEAD = (
    "Put `zerotune tune --` before the command that starts your ranks, such as `torchrun --nproc_per_node 2 train.py "
    "ARGUMENTS`."
)
_RANK_ARGUMENT = re.compile(r"--?(local[-_]rank|node[-_]rank|rank)(=.*)?")


@dataclass(frozen=True)
class Followed:
    """A command that can be tuned."""

    words: tuple[str, ...]  # of the command
    folder: Path  # its working directory
    notes: tuple[str, ...] = ()  # notes for the user, a sentence each
    wrapper: tuple[str, ...] = ()  # the words that start it from the same folder, if they may run once more


def followed(
    command: Sequence[str],
    folder: Path,
    tell: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    mapped: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Followed:
    """The command that a typed one starts; the typed one itself if it trains.

    A shell, make, uv and other wrappers are run up to the point where they start a launcher or a training. So is a
    Python program whose code may start others.

    `check` is called repeatedly while the wrapper runs. Its error ends the waiting. `mapped` has the places in the
    command that set DeepSpeed keys. `environment` is the shell's; None is this process's.

    Raises InputError if the command ended without a training, starts it where ZeroTune does not see it, or starts its
    ranks as no launcher does, or if only a wrapper reads a mapped file.
    """
    # A command that starts its ranks itself is tuned as it was typed.
    words = list(command)
    as_typed = Followed(tuple(words), folder)
    assigned = _take_assignments(words)
    environment = {**(os.environ if environment is None else environment), **assigned}
    found = started_elsewhere(words)
    if found is not None:
        raise _starts_elsewhere(found)
    if not words or not _is_wrapper(words, folder, environment):
        return as_typed
    # Any other one is run up to the point where it starts them.
    shown = _shown(words)
    in_python = is_python(words[0])
    has_waited = False

    def still_waiting(seconds: float) -> None:
        nonlocal has_waited
        advice = "" if has_waited else f" It has not started any launcher ({launchers_listed()}) so far. {_INSTEAD}"
        has_waited = True
        tell(f"still waiting for {shown} to start its training ({seconds:.0f} s).{advice}")

    began = time.monotonic()
    tell(f"{shown} is run up to the point where it starts its training.")
    end = follow_wrapper(words, folder, environment, still_waiting, check)
    # It may have started none that can be tuned, or have been the training itself.
    if isinstance(end, StartedElsewhere):
        raise _starts_elsewhere(end, shown)
    if isinstance(end, NoLaunch):
        if in_python:
            # The profile trial reports what is wrong with the program.
            return as_typed
        raise _came_to_nothing(shown, end)
    if end.is_worker:
        raise InputError(
            f"{shown} starts its {end.ranks} ranks within Python (torch.multiprocessing or the like).",
            where=_WHERE,
            remedy="Let the program train as the one rank that RANK, LOCAL_RANK and WORLD_SIZE describe, and type "
            f"`zerotune tune -- torchrun --nproc_per_node {end.ranks} SCRIPT ARGUMENTS`.",
        )
    if in_python and end.ranks == 1 and list(end.words[1:]) == words[1:]:
        return as_typed
    # A mapped file has to be an argument of a command that each trial starts.
    files = [file for file in map(FileTarget.read, mapped) if file is not None]
    for file in files:
        is_handed_over = file.positions(end.words, end.folder)
        if not is_handed_over and (end.folder != folder or not file.positions(words, folder)):
            raise InputError(
                f"{file.path} is no argument of {shown} or of the command that it starts, so no trial can change it.",
                where=f"--map {file.path}:{file.key}",
                remedy="Leave this mapping out: what cannot be changed stays as it was typed, and the rest is tuned. "
                "To tune the micro-batch too, let the training script read its size from the engine "
                "(engine.train_micro_batch_size_per_gpu()).",
            )
    # From here on the started command is the user's.
    set_ = {name: value for name, value in {**assigned, **end.variables}.items() if name not in end.unset}
    typed = [*(f"{name}={value}" for name, value in set_.items()), *_command_of(end, shown)]
    notes = [f"{shown} starts `{joined(typed)}`. ZeroTune tunes that command."]
    if end.folder != folder:
        notes.append(f"It does so in {end.folder}.")
    if end.unset:
        notes.append(
            f"It unsets {', '.join(end.unset)} first, but the trials keep it. Unset it before you type zerotune."
        )
    # A wrapper that prepares for long runs once more for a mapping of its file alone.
    may_repeat = end.folder == folder and (bool(files) or time.monotonic() - began < _QUICK_S)
    return Followed(tuple(typed), end.folder, tuple(notes), as_typed.words if may_repeat else ())


def _take_assignments(words: list[str]) -> dict[str, str]:
    assigned: dict[str, str] = {}
    # With options `env` is a wrapper.
    if words[:1] == ["env"] and not "".join(words[1:2]).startswith("-"):
        words.pop(0)
    while words and ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        assigned[name] = value
    return assigned


def _is_wrapper(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> bool:
    program = words[0]
    launcher = launcher_of(words)
    if launcher is not None and launcher.is_environment:
        # A shell is followed there too. A launcher or a script is read, and so is an option that cannot be followed.
        within_it = command_within(words, launcher)
        return within_it is not None and (_is_wrapper(within_it, folder, environment) or not _is_read(within_it[0]))
    if launcher_of_program(Path(program).name) is not None or ":" in program:
        return False
    if not is_python(program):
        path = shutil.which(program, path=environment.get("PATH"))
        return path is not None or os.access(folder / program, os.X_OK)
    position = python_target(words)
    if position is None or launcher_in(words) is not None:
        return False
    target = words[position]
    if words[position - 1] == "-m":
        file = module_file(target, (folder, *_installed(target)), "__main__.py")
        return file is not None and may_start_ranks(file, (folder, *_installed(target)))
    return may_start_ranks(folder / target, ((folder / target).parent, folder))


def _is_read(program: str) -> bool:
    return is_python(program) or launcher_of_program(Path(program).name) is not None


def _installed(module: str) -> tuple[Path, ...]:
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return ()
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return ()
    return (Path(spec.origin).parent.parent,)


def _command_of(launch: Launch, shown: str) -> list[str]:
    words = list(launch.words)
    if launch.ranks is not None and launch.ranks > 1:
        words = _torchrun(words, launch.ranks, shown)
    folder, _, program = words[0].rpartition(os.sep)
    if folder and os.path.realpath(folder) == os.path.realpath(Path(sys.executable).parent):
        # The program as ZeroTune's own environment finds it.
        words[0] = "python" if is_python(program) else program
    return words


def _torchrun(words: Sequence[str], ranks: int, shown: str) -> list[str]:
    position = python_target(words)
    of_rank = next((word for word in words if _RANK_ARGUMENT.fullmatch(word)), None)
    if position is None or of_rank is not None:
        raise InputError(
            f"{shown} starts its {ranks} ranks itself, by words that no launcher has ({of_rank or joined(words)}).",
            where=_WHERE,
            remedy=f"Type `zerotune tune -- torchrun --nproc_per_node {ranks} SCRIPT ARGUMENTS`: LOCAL_RANK tells a "
            "rank which one it is.",
        )
    as_module = ["--module"] if words[position - 1] == "-m" else []
    torchrun = Path(words[0]).with_name("torchrun")
    launcher = [str(torchrun)] if torchrun.exists() else [words[0], "-m", "torch.distributed.run"]
    return [*launcher, "--nproc_per_node", str(ranks), *as_module, *words[position:]]


def _starts_elsewhere(found: StartedElsewhere, wrapper: str = "") -> InputError:
    what = f"{wrapper} comes to {found.shown}, which ZeroTune did not run. {found.what}" if wrapper else found.what
    return InputError(what, where=_WHERE, remedy=found.kind.instead)


def _came_to_nothing(shown: str, end: NoLaunch) -> InputError:
    last_words = f" It said last: {end.last_words}" if end.last_words else ""
    if end.status is None:
        what = f"{shown} has started no training within ten minutes.{last_words}"
    else:
        what = f"{shown} ended (exit code {end.status}) before it started a launcher or a training.{last_words}"
    return InputError(what, where=_WHERE, remedy=_INSTEAD)


def _shown(words: Sequence[str]) -> str:
    text = joined([Path(words[0]).name, *words[1:]])
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def joined(words: Sequence[str]) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{name}={shlex.quote(value)}" if equals and ASSIGNMENT.match(word) else shlex.quote(word)


# A wrapper once more, for a trial that changes a file of the wrapper's.

_LONGEST_OF_VALUE_S = 180.0
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
    values = tuple((key, get_knob(config_values, key)) for key in sorted(of_wrapper))
    others = {key: target for key, target in arg_mappings.items() if str(key) not in of_wrapper}
    arguments = _started(entrypoint, command.arguments, values, folder, check)
    return entrypoint.model_copy(update={"arguments": arguments}), others


_seen: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _started(
    entrypoint: Entrypoint, words: Sequence[str], values: tuple[Any, ...], folder: Path, check: Callable[[], None]
) -> tuple[str, ...]:
    key = (entrypoint.wrapper, values, folder)
    if key not in _seen:
        in_time = within(_LONGEST_OF_VALUE_S, " ".join(entrypoint.wrapper), check)
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


def within(seconds: float, wrapper: str, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """A check that ends the waiting for a wrapper after some seconds, or as another check does."""
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


def typed_before(ranks: str, began: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables, without secrets, that a later shell may lack, of those that this process `began` with.

    They were set for this command or by its shell, or have the number of ranks.
    """
    began = psutil.Process().environ() if began is None else began
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
