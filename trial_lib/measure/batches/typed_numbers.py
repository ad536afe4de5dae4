"""The numbers in a program's command, each with its place as `--map` names it.

A rank calls this in the user's environment, which may lack PyYAML.
"""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.overrides import MICRO_BATCH

_LARGEST_FILE = 100_000
_OF_DEEPSPEED = {MICRO_BATCH, "zero_optimization"}
_OPTION = re.compile(r"--?[A-Za-z]")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)*)")
_DOTTED = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)+")


@dataclass(frozen=True)
class TypedNumber:
    """A number in a command.

    Attributes:
        name: its option, or the key of an override or of a file; empty for a word on its own.
        target: its place, as `--map` names it.
        shown: name and number, as the command has them.
        value: the number.
    """

    name: str
    target: str
    shown: str
    value: str


def numbers_in_words(arguments: Sequence[str]) -> Iterator[TypedNumber]:
    """Yields the numbers among a program's arguments: first those with a name, then words on their own."""
    words: list[TypedNumber] = []
    before = ""
    for position, word in enumerate(arguments, start=1):
        name, equals, value = word.partition("=")
        override = _OVERRIDE.fullmatch(name)
        if equals and value.isdecimal() and (_OPTION.match(name) or override):
            yield TypedNumber(name, override[1] if override else name, word, value)
        elif word.isdecimal() and (_OPTION.match(before) or _DOTTED.fullmatch(before)) and "=" not in before:
            yield TypedNumber(before, before, f"{before} {word}", word)
        elif word.isdecimal():
            words.append(TypedNumber("", f"argv:{position}", f"{word}, word {position} after the script,", word))
        before = word
    yield from words


def numbers_in_files(arguments: Sequence[str], folder: Path) -> Iterator[TypedNumber]:
    """Yields the numbers in the YAML and JSON files that a program's arguments name, except DeepSpeed's configuration.

    Args:
        arguments: of the program.
        folder: the folder of relative paths.
    """
    for word in arguments:
        for name in dict.fromkeys((word, word.partition("=")[2])):
            path = folder / name
            if path.suffix in (".json", ".yaml", ".yml") and path.is_file() and path.stat().st_size <= _LARGEST_FILE:
                document = _read(path)
                if isinstance(document, dict) and not _OF_DEEPSPEED.isdisjoint(document):
                    continue
                for key, value in _leaves(document, ()):
                    yield TypedNumber(key, f"{name}:{key}", f"{key}: {value} in {name}", value)


def numbers_in_objects(arguments: Sequence[str]) -> Iterator[TypedNumber]:
    """Yields the numbers in a command's JSON objects, plain or in base64. No `--map` names their places."""
    for before, word in pairwise(("", *arguments)):
        name, equals, value = word.partition("=")
        for option, text in ((before, word), (name, value) if equals and _OPTION.match(name) else ("", "")):
            document = _object(text)
            where = f"the {'JSON' if text[:1] == '{' else 'base64'} of {option if _OPTION.match(option) else 'a word'}"
            for key, number in _leaves(document, ()):
                yield TypedNumber(key, "", f"{key} {number} in {where}", number)


def _object(text: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):  # also binascii's
        found = json.loads(text if text[:1] == "{" else base64.urlsafe_b64decode(text))
        return found if isinstance(found, dict) else None
    return None


def _read(path: Path) -> Any:
    # A file that cannot be read does not have the batch size.
    with contextlib.suppress(Exception):
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        import yaml

        return yaml.safe_load(path.read_text(encoding="utf-8"))
    return None


def _leaves(node: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from _leaves(inner, (*keys, str(number)))
    elif type(node) is int and node >= 0:
        yield ".".join(keys), str(node)
