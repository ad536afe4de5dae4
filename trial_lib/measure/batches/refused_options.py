"""Values of options that the program's own parser would refuse, found without another run.

A search tries the values of an option. A parser that the program has used knows which of them it takes.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trial_lib.measure.batches.program_options import Parsers, with_underscores

# Options that the parser itself has.
_HELP = ("-h", "--help")


def refused_options(varied: Mapping[str, Sequence[Any]], parsers: Parsers) -> dict[str, str]:
    """Returns why the program would refuse options or their values: a clause for each option, by its name.

    Args:
        varied: the values to try, by the name of the option. None stays as typed, and a boolean has no word of its own.
        parsers: those that the program has used, each with whether it refuses options that it does not have.
    """
    found = {}
    for name, values in varied.items():
        reasons = [_refusal(parser, action, name, values) for parser, action in _actions_of(name, parsers)]
        reason = _unknown(name, parsers) if not reasons else "" if "" in reasons else reasons[0]
        if reason:
            found[name] = reason
    return found


def _actions_of(name: str, parsers: Parsers) -> Iterator[tuple[argparse.ArgumentParser, argparse.Action]]:
    """Yields the actions that an option stands for. A parser may take its beginning, or have it typed otherwise."""
    as_typed = with_underscores if _is_typed(name) else str
    for parser, _ in parsers:
        whole = [each for each in parser._actions if as_typed(name) in map(as_typed, each.option_strings)]
        begun = [each for each in parser._actions if any(known.startswith(name) for known in each.option_strings)]
        # As in argparse: an option counts before one that only begins so.
        yield from ((parser, action) for action in whole or begun * parser.allow_abbrev)


def _is_typed(name: str) -> bool:
    return any(with_underscores(word.partition("=")[0]) == with_underscores(name) for word in sys.argv[1:])


def _unknown(name: str, parsers: Parsers) -> str:
    """Returns why a program would refuse an option that none of its parsers has; empty if it may read it otherwise."""
    if not parsers or not all(is_strict for _, is_strict in parsers):
        return ""
    spellings = [each for parser, _ in parsers for action in parser._actions for each in action.option_strings]
    known = {each.lstrip("-"): each for each in spellings if each not in _HELP}
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)
    return f"your program has no option {name}" + (f", and {known[near[0]]} is the nearest" if near else "")


def _refusal(parser: argparse.ArgumentParser, action: argparse.Action, name: str, values: Sequence[Any]) -> str:
    return next(filter(None, (_refusal_of(parser, action, name, value) for value in values)), "")


def _refusal_of(parser: argparse.ArgumentParser, action: argparse.Action, name: str, value: Any) -> str:
    takes_none, takes_one = action.nargs in (0, "?", "*"), action.nargs != 0
    if value is None or value is False:
        return ""
    if value is True:
        # If it is typed with a word, the word is changed.
        return "" if takes_none or _is_typed(name) else f"{name} needs a word behind it, such as 'true'"
    if not takes_one:
        return f"{name} takes no word behind it, and {value} is one"
    if isinstance(action.type, argparse.FileType):
        # It would open the file.
        return ""
    try:
        parser._get_values(action, [str(value)])
    except argparse.ArgumentError as error:
        return f"your program refuses a value of {name}: {error}"
    except Exception:  # noqa: BLE001 - a type of the user's own, which decides when the program runs
        return ""
    return ""
