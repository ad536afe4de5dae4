"""Finds the place from which a program has its batch size, if its batches do not follow the candidate."""

import argparse
import base64
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.rank.patching import put
from zerotune.trial_lib.rank.user_program import may_be_of_the_user

_LARGEST_FILE = 100_000  # bytes
_OF_DEEPSPEED = {MICRO_BATCH, "zero_optimization"}
_OPTION = re.compile(r"--?[A-Za-z]")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)*)")
_DOTTED = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)+")


@dataclass(frozen=True)
class TypedNumber:
    name: str  # its option, or the key of an override or of a file; empty for a word on its own
    target: str  # its place, as `--map` names it
    shown: str  # name and number, as the command has them
    value: str  # the number


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
    """The numbers in the YAML and JSON files that a program's arguments name, except DeepSpeed's configuration."""
    for word in arguments:
        for name in dict.fromkeys((word, word.partition("=")[2])):
            path = folder / name
            if path.suffix in (".json", ".yaml", ".yml") and _is_small(path):
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


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= _LARGEST_FILE


def _read(path: Path) -> Any:
    # A file that cannot be read does not have the batch size.
    with contextlib.suppress(Exception):
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        import yaml  # the user's environment may have none

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


def composed_by_hydra() -> dict[str, Any]:
    """The configuration that Hydra has composed: its numbers, its interpolations, and whole sections of DeepSpeed's.

    Empty without Hydra, or if it writes no file of its own.
    """
    with contextlib.suppress(Exception):
        own = sys.modules["hydra.core.hydra_config"].HydraConfig.get()
        found = _read(Path(str(own.runtime.output_dir), str(own.output_subdir), "config.yaml"))
        return _numbers_of(found) if isinstance(found, dict) else {}
    return {}


def _numbers_of(node: dict[Any, Any]) -> dict[str, Any]:
    # The rest may be secret.
    if not _OF_DEEPSPEED.isdisjoint(node):
        return node
    kept = {str(key): _numbers_of(inner) if isinstance(inner, dict) else inner for key, inner in node.items()}
    return {
        key: inner for key, inner in kept.items() if isinstance(inner, (dict, int, float)) or str(inner)[:2] == "${"
    }


# Options that a program has read from its command line, with their defaults

# These packages make options of a function's parameters. The first keeps the underscores of their names.
_OF_FUNCTIONS = {"fire": "_", "typer": "-", "click": "-"}


@dataclass(frozen=True)
class ProgramOption:
    names: tuple[str, ...]  # all its spellings
    value: int  # typed or by default


# Parsers that a program has used, each with whether it refuses options that it does not have.
Parsers = list[tuple[argparse.ArgumentParser, bool]]
parsers_used: Parsers = []  # the parsers of this process, in the order of their first use
_parsed: list[ProgramOption] = []
# All options of the parsers, by their names with underscores. They stay in this process unless a value is asked for.
_values: dict[str, Any] = {}


def note_parsers() -> None:
    """Makes each `argparse` parser that the program uses from now on keep its options' values."""
    original = argparse.ArgumentParser.parse_known_args
    if hasattr(original, "__wrapped__"):
        return

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
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
    put(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def values_read(names: Iterable[str]) -> dict[str, bool | int | float | str]:
    """Some options' values as the program's own parser has read them, typed or by default. Others are left out."""
    found = {}
    for name in names:
        value = _values.get(with_underscores(name))
        plain = value.value if isinstance(value, Enum) else value
        # A record that is read back holds integers of 64 bits.
        if isinstance(plain, (bool, float, str)) or (isinstance(plain, int) and abs(plain) < 2**63):
            found[name] = plain
    return found


def _note_use(parser: argparse.ArgumentParser, words: Any, caller: FrameType) -> None:
    # A parser refuses unknown options if `parse_args` has called it, or a Trainer's parser that returns no rest. Those
    # of a subcommand are the business of the parser above.
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
    """The whole numbers among the options of `argparse`, the last read first.

    If the program has imported a package that makes options of parameters, the running functions' parameters count too.
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


_STAGE_NAME = re.compile(r"(^|[-_.])zero[-_]?(optimization[-_])?stage$", re.IGNORECASE)


def stage_repeated(arguments: Sequence[str], stage: int) -> str | None:
    """The option, or override, in which a command repeats the ZeRO stage of the engine; None if there is none."""
    typed = (number for number in numbers_in_words(arguments) if number.value == str(stage))
    named = (number for number in typed if _STAGE_NAME.search(number.name))
    # Another model's has a word more: --ref-zero-stage.
    found = min(named, key=lambda number: len(number.name), default=None)
    return None if found is None else found.target


_BATCH_NAME = re.compile(r"batch|ims_per|(^|[-_.])(bs|bsz|mbs|mbsz|bz)($|[-_])", re.IGNORECASE)
_MOST_FILES = 200
_ENGINE = "from the engine (engine.train_micro_batch_size_per_gpu())"


@dataclass(frozen=True)
class BatchSource:
    """The places from which a program may read its batch size."""

    arguments: Sequence[str]  # of its command line
    environment: Mapping[str, str]  # its environment variables
    folder: Path  # its working directory
    replicas: int = 1  # ranks that each feed a batch of their own

    def ignored_batch_reason(
        self, asked: int, arrived: int, configuration: Mapping[str, Any] | None, accumulation: int = 1, among: int = 1
    ) -> str:
        """Says why batches do not follow the candidate, with the remedy that fits this program.

        The configuration is the one in the code. A batch of the typed size is divided `among` so many ranks.
        """
        fed = f"The script fed batches of {arrived} to an engine that was set to a micro-batch of {asked}."
        if divided := self._divided(asked, arrived):
            return f"{fed} {divided}"
        typed = replace(self, replicas=self.replicas // among)
        way = typed._way(arrived * among, configuration or {}, accumulation)
        return f"{fed} {way} If the data set itself is that small, use more data."

    def _divided(self, asked: int, arrived: int) -> str:
        if self.replicas == 1 or asked != arrived * self.replicas:
            return ""
        typed = [number.name for number in numbers_in_words(self.arguments) if _is_of_a_batch(number, asked)]
        read = [self._spelled(each) for each in options_read() if each.value == asked and _is_batch(each)]
        name = next(iter((*typed, *read)), None)
        if name is None:
            return ""
        return (
            f"It divides its {name} {asked} among its {self.replicas} ranks, as Accelerate does with split_batches, "
            f"but DeepSpeed takes that for the size of each rank. Turn the dividing off, and type your {name} divided "
            f"by {self.replicas}. Then the same rows arrive, and all sizes agree."
        )

    def ignored_accumulation_reason(self, asked: int, micro_batches: int) -> str:
        count = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
        way = "Train within `with accelerator.accumulate(model):`, or let" if "accelerate" in sys.modules else "Let"
        return (
            f"The script took an optimizer step after {count}, but its engine was set to an accumulation of {asked}. "
            f"The script counts by itself. {way} it read the number from the engine "
            "(engine.gradient_accumulation_steps()). It may also read an option or an environment variable. Name that "
            f"one with {_written('--accumulation', ACCUMULATION)}"
        )

    def _way(self, arrived: int, configuration: Mapping[str, Any], accumulation: int) -> str:
        typed = [number for number in numbers_in_words(self.arguments) if number.value == str(arrived)]
        variables = [
            name
            for name, value in sorted(self.environment.items())
            if _BATCH_NAME.search(name) and value.strip() == str(arrived)
        ]
        named = [number for number in typed if _is_of_a_batch(number)]
        if named:
            return f"Its command line has {named[0].shown}. {_mapping(named[0].target)}"
        if variables:
            return f"Its environment has {variables[0]}={arrived}. {_mapping(variables[0])}"
        for number in numbers_in_files(self.arguments, self.folder):
            if number.value == str(arrived) and _is_of_a_batch(number):
                return f"A file of its command line has {number.shown}. {_mapping(number.target)}"
        for option in options_read():
            for key, size in ((MICRO_BATCH, arrived), (TRAIN_BATCH, arrived * self.replicas * accumulation)):
                if option.value == size and _is_batch(option):
                    name = self._spelled(option)
                    return f"Its option {name} is {size}. {_mapping(name, key)}"
        for number in numbers_in_objects(self.arguments):
            # DeepSpeed's own object there follows the trial.
            if number.value == str(arrived) and _is_of_a_batch(number) and number.name != TRAIN_BATCH:
                return (
                    f"It has {number.shown}, which no trial changes. Let it read the size {_ENGINE}. Or map its place "
                    "in the YAML or JSON file (FILE:KEY), if the command that you type names the file."
                )
        if (file := self._file_with(arrived)) is not None:
            return (
                f"{file} has {MICRO_BATCH} {arrived}. If the code always reads that file, let it read the file that "
                f"its command line names, or the size {_ENGINE}."
            )
        for name, value in _leaves(composed_by_hydra(), ()):
            # DeepSpeed's own key there follows the trial.
            if value == str(arrived) and _BATCH_NAME.search(name) and name.rpartition(".")[2] != MICRO_BATCH:
                return f"Hydra's configuration has {name}: {value}. {_mapping(name if '.' in name else f'++{name}')}"
        if configuration.get(MICRO_BATCH) == arrived:
            return (
                f"The configuration in the code has {MICRO_BATCH} {arrived}. Let the code read the size {_ENGINE}, "
                "not from there."
            )
        if typed:
            return f"Its command line has {typed[0].shown}, which may be its batch size. {_mapping(typed[0].target)}"
        if "hydra" in sys.modules:
            return (
                "Its configuration is Hydra's. Name the override that sets the batch size, such as "
                f"{_written('trainer.batch_size')} A key without a dot is written ++batch_size."
            )
        return (
            f"Let it read the size {_ENGINE}, or from the JSON file that its command line names. It may also read an "
            f"option or an environment variable. Name that one with {_written('--batch-size')}"
        )

    def _spelled(self, option: ProgramOption) -> str:
        typed = (name for name in option.names for word in self.arguments if word.partition("=")[0] == name)
        return next(typed, max(option.names, key=len))

    def _file_with(self, size: int) -> Path | None:
        paths = [*sorted(self.folder.glob("*.json")), *sorted(self.folder.glob("*/*.json"))]
        for path in filter(_is_small, paths[:_MOST_FILES]):
            try:
                config = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(config, dict) and config.get(MICRO_BATCH) == size:
                return path.relative_to(self.folder)
        return None


def _is_of_a_batch(number: TypedNumber, value: int | None = None) -> bool:
    return bool(_BATCH_NAME.search(number.name)) and value in (None, int(number.value))


def _is_batch(option: ProgramOption) -> bool:
    return any(map(_BATCH_NAME.search, option.names))


_FOUND = "Let each trial set it with"


def _mapping(target: str, key: str = MICRO_BATCH) -> str:
    return f"{_FOUND} {_written(target, key)}"


def found_in(reason: str) -> tuple[str, str] | None:
    """The key and the place of a batch size that `ignored_batch_reason` has found; None if it has found none."""
    found = re.search(rf"{_FOUND} --map (\w+)=(\S+) \(", reason)
    return None if found is None else (found[1], found[2])


def _written(target: str, key: str = MICRO_BATCH) -> str:
    return f"--map {key}={target} (in a YAML: arg_mappings: {{{key}: {target}}})."
