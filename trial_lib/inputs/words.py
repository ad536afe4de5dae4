"""A command's words, the launcher's options among them, and questions to the user's interpreter."""

import difflib
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerotune.trial_lib.inputs.launchers import ONE_NODE, SLOTS, Does, Option, launchers_listed
from zerotune.trial_lib.messages.errors import InputError

REMEDY = "Write `python3 SCRIPT ARGUMENTS`: ZeroTune starts the ranks itself."
# The beginning of a word that sets an environment variable before a command.
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

_SHELL_SYNTAX = frozenset("|&;<>()$`*?\n")


class Words:
    """The words of a command while it is read."""

    def __init__(
        self,
        words: list[str],
        where: str,
        *,
        follows: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path = Path(),
    ) -> None:
        self.rest, self.where = words, where  # the words that are not read yet, and the place that errors name
        self.notes: list[str] = []  # one sentence for each word that was left out
        self.follows = follows  # whether the launcher's options count, as in a typed command, but not in a YAML
        self.environment = dict(environment or {})  # with the assignments before the command
        self.folder = folder  # of relative paths
        self.program = ""  # of the launcher that is being read, as the user typed it

    def __bool__(self) -> bool:
        return bool(self.rest)

    @property
    def first(self) -> str:
        return self.rest[0]

    def take(self) -> str:
        return self.rest.pop(0)

    def take_value(self, option: str) -> str:
        """Returns the value of the option just read, which is behind its `=` or the next word."""
        if "=" in option:
            return option.partition("=")[2]
        return self.take_after(option)

    def take_after(self, option: str) -> str:
        if not self.rest:
            raise self.error(f"nothing follows {option}.")
        return self.take()

    def error(self, what: str, remedy: str = "") -> InputError:
        typed = f"Write what starts your training: python, {launchers_listed()}, and its arguments."
        typed = typed if self.follows else REMEDY
        return InputError(what, where=self.where, remedy=remedy or typed)


def split_command(command: str, where: str) -> list[str]:
    """Raises InputError: a quote stays open, or there is shell syntax outside of quotes."""
    text = command.strip().replace("\\\n", " ")
    syntax = _shell_syntax(text)
    if syntax:
        raise InputError(
            f"the entrypoint has {syntax!r}, which only a shell understands, and ZeroTune starts no shell.",
            where=where,
            remedy="Write one plain command, put the character in single quotes if it belongs to an argument, or name "
            "a Python script that does the rest.",
        )
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"the entrypoint cannot be split into words ({str(error).lower()}).", where=where, remedy="Close the quote."
        ) from None


def _shell_syntax(text: str) -> str | None:
    quote = ""
    escaped = False
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            if character == quote:
                quote = ""
            elif quote == '"' and character in "$`":
                return character
        elif character in "'\"":
            quote = character
        elif character in _SHELL_SYNTAX or (character == "~" and (position == 0 or text[position - 1].isspace())):
            operator = text[position : position + 2]
            return operator if operator in ("&&", "||", ">>", "$(") else character
    return None


# Reading a launcher's options off a command.

_SEVERAL_NODES = (
    "One node alone would be another training. For several, type `deepspeed --hostfile FILE`, or tune over a Ray "
    "cluster by `--ray ADDRESS`. `zerotune plan --on GPU:2x8` foresees two nodes of eight, with a command for one."
)
_THIS_NODE = {"count": ("1", "1:1", "1-1", "-1"), "rank": ("0", "-1")}


def read_options(
    words: Words,
    launcher: str,
    table: Mapping[str, Option],
    *,
    is_dash_underscore: bool = False,
    last: Sequence[str] = (),
) -> dict[str, str]:
    """Takes the options of a launcher off the words, up to the script. Returns those that count, "" for a bare one.

    No other option follows one in `last`. Raises InputError: an option is unknown, has no value, asks for several
    nodes, or asks for something that ZeroTune cannot do.
    """
    found: dict[str, str] = {}
    while words and words.first.startswith("-"):
        word = words.take()
        flag, option, attached = _option(words, launcher, table, word, is_dash_underscore)
        value = attached or ""
        if option.has_value and attached is None:
            value = words.take_after(flag)
        _follow(words, launcher, flag, option, value, found)
        if flag in last:
            break
    return found


def options_from_environment(words: Words, launcher: str, table: Mapping[str, Option]) -> dict[str, str]:
    """Returns the options of torchrun that the environment sets, as `PET_NPROC_PER_NODE=2` does.
    Raises InputError: an option asks for something that ZeroTune cannot do.
    """
    found: dict[str, str] = {}
    for name, value in words.environment.items():
        flag = "--" + name.removeprefix("PET_").lower()
        option = table.get(flag)
        if not name.startswith("PET_") or option is None or (not option.has_value and value in ("", "0")):
            continue
        _follow(words, launcher, name, Option(option.does, option.why, option.has_value, flag), value, found)
    return found


def _option(
    words: Words, launcher: str, table: Mapping[str, Option], word: str, is_dash_underscore: bool
) -> tuple[str, Option, str | None]:
    # An option's flag in full, the option, and the value in the same word, or None.
    flag, equals, value = word.partition("=")
    attached = value if equals else None
    if flag not in table and not flag.startswith("--") and len(flag) > 2:
        flag, attached = word[:2], word[2:]
    if is_dash_underscore and flag.startswith("--"):
        flag = "--" + flag[2:].replace("-", "_")
    if flag in table:
        return flag, table[flag], attached
    # Launchers read their options with argparse, which accepts the beginning of a flag.
    begun = [known for known in table if flag.startswith("--") and len(flag) > 2 and known.startswith(flag)]
    if len(begun) == 1:
        return begun[0], table[begun[0]], attached
    near = begun or difflib.get_close_matches(flag, table, n=1)
    raise words.error(
        f"the option {flag} of the launcher {launcher} is not supported.",
        f"Did you mean {' or '.join(near)}?"
        if near and words.follows
        else f"Leave it out, or write `python3 SCRIPT ARGUMENTS`: {SLOTS}.",
    )


def _follow(words: Words, launcher: str, flag: str, option: Option, value: str, found: dict[str, str]) -> None:
    # Adds an option to `found`, notes that it is left out, or refuses it.
    does, why = option.does, option.why
    shown = f"{flag} {value}".rstrip()
    if does is Does.FOLLOWED:
        found[option.name or flag] = value
    elif does is Does.LEFT_OUT:
        words.notes.append(f"{shown} is left out: {why}.")
    elif does is Does.REFUSED:
        raise words.error(f"the option {flag} of the launcher {launcher} is not supported: {why}.", "Leave it out.")
    elif value in _THIS_NODE["rank" if flag.lower().endswith("rank") else "count"]:
        found[option.name or flag] = value
        words.notes.append(f"{shown} is left out: {ONE_NODE}.")
    else:
        if not words.follows:
            remedy = f"Leave {flag} out: a search runs on one node, with resources.slots_per_trial devices."
        else:
            remedy = _SEVERAL_NODES
        raise words.error(f"{shown} asks for several nodes.", remedy)


def ask(words: Words, command: Sequence[str], longest_s: float) -> "subprocess.CompletedProcess[str]":
    """Runs a command with the folder and the environment of the user's. Raises OSError or subprocess.TimeoutExpired."""
    return subprocess.run(
        list(command),
        cwd=words.folder,
        env=words.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=longest_s,
        check=False,
    )
