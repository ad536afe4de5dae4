"""Reading a launcher's options off a command."""

import difflib
from collections.abc import Mapping, Sequence

from trial_lib.command.launcher_options import ONE_NODE, SLOTS, Does, Option
from trial_lib.command.words import Words

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
    """Takes the options of a launcher off the words, up to the script, and returns the options that count.

    Args:
        words: of the command. They note the options that are left out.
        launcher: its name.
        table: its options.
        is_dash_underscore: whether the options may be spelt with dashes or with underscores.
        last: options that no other option follows.

    Returns:
        The value of each option that counts, "" if the option has none.

    Raises:
        InputError: an option is unknown, has no value, asks for several nodes, or asks for something that ZeroTune
            cannot do.
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

    Args:
        words: of the command.
        launcher: its name.
        table: its options.

    Raises:
        InputError: an option asks for something that ZeroTune cannot do.
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
    """Returns an option's flag in full, the option, and the value in the same word, or None."""
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
    """Adds an option to `found`, notes that it is left out, or refuses it."""
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
