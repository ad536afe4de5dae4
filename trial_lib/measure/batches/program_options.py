"""The options that a program has read from its command line, with their defaults.

Only the program's own parser has the name of an option that was not typed.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

from trial_lib.measure.user_program import may_be_of_the_user

# These packages make options of a function's parameters. The first keeps the underscores of their names.
_OF_FUNCTIONS = {"fire": "_", "typer": "-", "click": "-"}


@dataclass(frozen=True)
class ProgramOption:
    """One option, as the program has read it.

    Attributes:
        names: all its spellings.
        value: typed or by default.
    """

    names: tuple[str, ...]
    value: int


Parsers = list[tuple[argparse.ArgumentParser, bool]]
"""Parsers that a program has used, each with whether it refuses options that it does not have."""

parsers_used: Parsers = []
"""The parsers of this process, in the order of their first use."""

_parsed: list[ProgramOption] = []
# All options of the parsers, by their names with underscores. They stay in this process unless a value is asked for.
_values: dict[str, Any] = {}


def note_parsers() -> None:
    """Makes each `argparse` parser that the program uses from now on keep its options' values."""
    original = argparse.ArgumentParser.parse_known_args
    if hasattr(original, "__wrapped__"):
        return

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        """Replaces `argparse.ArgumentParser.parse_known_args`."""
        parsed = original(self, *args, **kwargs)
        words = args[0] if args else kwargs.get("args")
        _note_use(self, words, sys._getframe(1))
        values = vars(parsed[0]) if hasattr(parsed[0], "__dict__") else {}
        for action in self._actions:
            value = values.get(action.dest)
            if action.dest in values:
                _values.update(dict.fromkeys(map(with_underscores, action.option_strings), value))
            if action.option_strings and isinstance(value, int) and not isinstance(value, bool):
                _parsed.append(ProgramOption(tuple(action.option_strings), value))
        return parsed

    parse_known_args.__wrapped__ = original  # type: ignore[attr-defined]
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def values_read(names: Iterable[str]) -> dict[str, bool | int | float | str]:
    """Returns the values of some options as the program's own parser has read them, typed or by default.

    Args:
        names: of the options, with dashes or underscores. One that no parser has, or that has no value, is left out.
    """
    found = {}
    for name in names:
        value = _values.get(with_underscores(name))
        plain = value.value if isinstance(value, Enum) else value
        if isinstance(plain, (bool, int, float, str)):
            found[name] = plain
    return found


def _note_use(parser: argparse.ArgumentParser, words: Any, caller: FrameType) -> None:
    """Keeps a parser of the program's own command line.

    It refuses unknown options if `parse_args` has called it, or a Trainer's parser that returns no rest. Those of a
    subcommand are the business of the parser above.
    """
    name = caller.f_code.co_name
    is_of_subcommand = isinstance(caller.f_locals.get("self"), argparse._SubParsersAction)
    if not is_of_subcommand and words is not None and list(words) != sys.argv[1:]:
        return
    returns_rest = caller.f_locals.get("return_remaining_strings", False)
    is_strict = is_of_subcommand or name == "parse_args" or (name == "parse_args_into_dataclasses" and not returns_rest)
    if not any(parser is known for known, _ in parsers_used):
        parsers_used.append((parser, is_strict))


def with_underscores(name: str) -> str:
    """Returns a long option with underscores in the place of dashes, as a Trainer's parser has it as well."""
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


def options_read() -> Iterator[ProgramOption]:
    """Yields the whole numbers among the options, the last that were read first.

    The options are those of `argparse`. If the program has imported a package that makes options of parameters, the
    parameters of the running functions count too.
    """
    yield from reversed(_parsed)
    joint = next((joint for package, joint in _OF_FUNCTIONS.items() if package in sys.modules), None)
    if joint is None:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if may_be_of_the_user(code.co_filename):
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                value = frame.f_locals.get(name)
                if isinstance(value, int) and not isinstance(value, bool):
                    yield ProgramOption((f"--{name.replace('_', joint)}",), value)
        frame = frame.f_back
