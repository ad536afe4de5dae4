"""A value in a YAML or JSON file that the user's command names. A trial gets its own copy of the file."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trial_lib.command.switches import SwitchValue, text_of
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import read_bounded

FILE_TARGET = r"[^\s=:]+\.(yaml|yml|json):[^\s=:]+"
"""How such a target is written: `conf/train.yaml:trainer.batch`."""

# An anchor or a tag before a value belongs to the value.
_PROPERTIES = re.compile(r"([&!]\S*\s+)*")


@dataclass(frozen=True)
class DocumentValue:
    """A value in a document. Replacing it keeps every other character.

    Attributes:
        document: the whole text.
        begin: the position of the value's first character.
        end: the position behind its last character.
    """

    document: str
    begin: int
    end: int

    @property
    def text(self) -> str:
        """The value's text."""
        return self.document[self.begin : self.end]

    def replaced(self, value: str) -> str:
        """Returns the document with another value."""
        return self.document[: self.begin] + value + self.document[self.end :]


@dataclass(frozen=True)
class FileTarget:
    """A place in the command that is a value in a file.

    Attributes:
        path: the path of the file, as the user wrote it.
        key: the path to the value, with dots. A number counts from 0 in a list.
    """

    path: str
    key: str

    @classmethod
    def read(cls, target: str) -> "FileTarget | None":
        """Returns a target that is a value in a file. None for any other target."""
        if target.startswith("-") or not re.fullmatch(FILE_TARGET, target):
            return None
        path, _, key = target.partition(":")
        return cls(path, key)

    def positions(self, arguments: Sequence[str], folder: Path) -> list[tuple[int, str]]:
        """Returns each position of the file's path in the arguments, and the text before it, such as `--config=`.

        A path may be relative to a folder that another argument names, as in `-d configs small.yml`.
        """
        own = (folder / self.path).resolve()
        found = []
        for position, word in enumerate(arguments):
            name, equals, value = word.partition("=")
            for before, path in (("", word), (name + equals, value)):
                if path and (folder / path).resolve() == own:
                    found.append((position, before))
                    break
        if not found:
            # A word may be too long for a path.
            folders = [folder / word for word in arguments if word and os.path.isdir(folder / word)]  # noqa: PTH112
            found = [
                (position, "")
                for position, word in enumerate(arguments)
                if word and any((each / word).resolve() == own for each in folders)
            ]
        return found

    def find(self, arguments: Sequence[str], folder: Path, document: str | None = None) -> DocumentValue:
        """Returns the value in the file.

        Args:
            arguments: the program's arguments.
            folder: the folder of relative paths.
            document: the text to look in. None reads the file.

        Raises:
            InputError: no argument is the file's path, the file cannot be read, or it has no such value.
        """
        if not self.positions(arguments, folder):
            remedy = "Name a file that is: a trial is given its own copy in the place of that argument."
            raise self._error(f"no argument of the program is {self.path}", remedy)
        try:
            text = read_bounded(folder / self.path) if document is None else document
            # JSON may be indented with tabs, which YAML refuses.
            node: yaml.Node | None = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            problem = " ".join(str(error).split())
            raise self._error(f"{self.path} cannot be read ({problem})", "Mend it, or name another place.") from None
        for step in self.key.split("."):
            node = _inner(node, step)
        if not isinstance(node, yaml.ScalarNode):
            remedy = "Write its keys from the top, with dots between them."
            raise self._error(f"{self.path} has no value {self.key}", remedy)
        begin, end = node.start_mark.index, node.end_mark.index
        properties = _PROPERTIES.match(text, begin, end)
        return DocumentValue(text, properties.end() if properties else begin, end)

    def _error(self, what: str, remedy: str) -> InputError:
        return InputError(f"{what}.", where=f"{self.path}:{self.key}", remedy=remedy)


def in_wrapper(
    arg_mappings: Mapping[Any, str], arguments: Sequence[str], wrapper: Sequence[str], folder: Path
) -> dict[str, str]:
    """Returns the mappings to files that a wrapper reads, and does not hand over to the program.

    Args:
        arg_mappings: the place that sets each DeepSpeed key.
        arguments: the program's.
        wrapper: the words that the user typed; none if they start the program themselves.
        folder: the folder of relative paths.
    """
    files = ((str(key), target, FileTarget.read(target)) for key, target in arg_mappings.items() if wrapper)
    return {key: target for key, target, file in files if file is not None and not file.positions(arguments, folder)}


def text_in_file(place: str, value: SwitchValue, typed: str) -> str:
    """Returns the text of a value in a YAML or JSON file, quoted if it would not read back as text.

    Args:
        place: the place, which names the file.
        value: the value to set.
        typed: the text of the value there now.
    """
    text = text_of(value, typed)
    if not isinstance(value, str):
        return text.lower() if isinstance(value, bool) else text
    file = FileTarget.read(place)
    if file is not None and file.path.endswith(".json"):
        return json.dumps(value)
    try:
        is_plain = bool(yaml.safe_load(text) == value) and not re.search(r"[#,\[\]{}\n]|:\s|^\s|\s$", text)
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(value)


def unquoted(text: str) -> str:
    """Returns the text that a scalar of YAML or JSON means."""
    try:
        loaded = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return text
    return loaded if isinstance(loaded, str) else text


def _inner(node: yaml.Node | None, step: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        named = (value for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value == step)
        return next(named, None)
    if isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
        found: yaml.Node = node.value[int(step)]
        return found
    return None
