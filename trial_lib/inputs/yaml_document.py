"""A YAML document that keeps the line and column of every node, for errors, and how ZeroTune writes one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded


@dataclass(frozen=True)
class YamlDocument:
    path: Path  # the file. For fields that no file has, such as those of a typed command, their name in errors.
    data: dict[str, Any]  # its content
    text: str = ""  # the file's text
    root: yaml.MappingNode | None = None  # the file's nodes, with their lines and columns

    def where(self, location: Sequence[str | int], *, key: bool = False) -> str:
        """Returns `file:line:column` of the value at a location, or of as much of the location as there is.

        With `key` it is the place of the last key itself, not of its value.
        """
        if self.root is None:
            return str(self.path)
        node: yaml.Node = self.root
        start = node
        for step in location:
            child = next((child for child in _children(node) if child.names(step)), None)
            if child is None:
                break
            node = child.value
            start = child.key if key and child.key is not None else node
        return _place(self.path, start.start_mark)


def read_yaml(path: Path) -> YamlDocument:
    """Returns the YAML document in a file. Nothing in it is executed.

    Numbers such as `1e-4` are numbers, as in YAML 1.2 and JSON (PyYAML's own rule makes them text). Raises InputError:
    the file is missing, a directory, not UTF-8, empty, not YAML, no mapping, or has a key twice.
    """
    return parse_yaml(_read_text(path), path)


def parse_yaml(text: str, path: Path) -> YamlDocument:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise InputError("the file is empty.", where=str(path), remedy="Write at least an `entrypoint`.")
        # The node of a set (`!!set`) is one of a mapping too.
        if not isinstance(root, yaml.MappingNode) or root.tag != _MAPPING:
            what = f"an experiment is a mapping, this is {describe(loader.construct_document(root))}."
            remedy = "Write lines such as `entrypoint: python3 train.py`."
            raise InputError(what, where=_place(path, root.start_mark), remedy=remedy)
        _check_size(root, path)
        _check_keys(root, path)
        return YamlDocument(path, loader.construct_document(root), text, root)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "it cannot be read"
        what = f"not valid YAML: {problem}."
        remedy = "Mend the YAML there."
        raise InputError(what, where=_place(path, error.problem_mark or error.context_mark), remedy=remedy) from None
    except RecursionError:
        raise InputError("the YAML is nested too deeply.", where=str(path), remedy="Flatten it.") from None
    finally:
        loader.dispose()


def _read_text(path: Path) -> str:
    remedy = "Name the YAML file that describes the experiment."
    try:
        text = read_bounded(path)
    except FileNotFoundError:
        raise InputError("the file does not exist.", where=str(path), remedy=remedy) from None
    except IsADirectoryError:
        raise InputError("this is a directory, not a file.", where=str(path), remedy=remedy) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"the file is not UTF-8 (byte {error.start}).", where=str(path), remedy="Save it as UTF-8."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"the file cannot be read ({error}).", where=str(path), remedy=remedy) from None
    forbidden = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if forbidden:
        line = text.count("\n", 0, forbidden.start()) + 1
        column = forbidden.start() - (text.rfind("\n", 0, forbidden.start()) + 1) + 1
        what = f"the character U+{ord(forbidden.group()):04X} is not allowed in YAML."
        raise InputError(what, where=f"{path}:{line}:{column}", remedy="Remove it.")
    return text


_MAPPING = yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG


class _Loader(yaml.SafeLoader):
    """Each of its errors has a line and a column."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and value.bit_length() > 64:
                raise ValueError("more than 64 bits")
            if isinstance(value, str):
                value.encode()  # refuses half a character, which no file name or argument can contain
                if "\0" in value:
                    raise ValueError("it holds a NUL")
            return value
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            # PyYAML lets these through, for a date such as 2024-13-45 and for an explicit tag that does not fit.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"this is not a valid {kind} ({error})", node.start_mark
            ) from None


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+|[0-9]*\.[0-9]+|[0-9]+\.)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


@dataclass(frozen=True)
class _Child:
    key: yaml.Node | None
    position: int
    value: yaml.Node

    def names(self, step: str | int) -> bool:
        return self.position == step if self.key is None else self.key.value == str(step)


def _children(node: yaml.Node) -> list[_Child]:
    if isinstance(node, yaml.MappingNode):
        return [_Child(key, position, value) for position, (key, value) in enumerate(node.value)]
    if isinstance(node, yaml.SequenceNode):
        return [_Child(None, position, value) for position, value in enumerate(node.value)]
    return []


def _place(path: Path, mark: yaml.Mark | None) -> str:
    return str(path) if mark is None else f"{path}:{mark.line + 1}:{mark.column + 1}"


_MOST_VALUES = 100_000


def _check_size(root: yaml.Node, path: Path) -> None:
    # Refuses aliases of aliases, by which a few lines become millions of values.
    sizes: dict[int, int] = {}
    open_now: set[int] = set()

    def size_of(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in open_now:  # a node that contains itself is refused with its value
            return 1
        open_now.add(id(node))
        size = 1 + sum(size_of(child.value) for child in _children(node))
        open_now.remove(id(node))
        if size > _MOST_VALUES:
            what = f"with its aliases written out, this has more than {_MOST_VALUES:,} values."
            raise InputError(what, where=_place(path, node.start_mark), remedy="Leave aliases of aliases out.")
        sizes[id(node)] = size
        return size

    size_of(root)


_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


def _check_keys(root: yaml.Node, path: Path) -> None:
    # Refuses a key that a mapping has twice, and a key that is no text.
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias may point back to what holds it
            continue
        seen.add(id(node))
        first: dict[str, int] = {}
        for child in _children(node):
            waiting.append(child.value)
            if child.key is None:
                continue
            where = _place(path, child.key.start_mark)
            if child.key.tag not in _KEY_TAGS:
                kind = child.key.tag.rpartition(":")[2]
                shown = f" {child.key.value}" if isinstance(child.key, yaml.ScalarNode) else ""
                what = f"a key is text, this one{shown} is of type {kind}."
                raise InputError(what, where=where, remedy="Put it in quotes.")
            name = str(child.key.value)
            if name in first:
                what = f'the key "{name}" occurs twice, first in line {first[name]}.'
                raise InputError(what, where=where, remedy="Keep one of the two.")
            first[name] = child.key.start_mark.line + 1


def describe(value: Any) -> str:
    """Returns a few words about a value, for a sentence such as "expected a list, found the number 3"."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return f'the text "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else f"{value} (a {type(value).__name__})"


# How ZeroTune writes a document.

_NEVER_FOLDED = 1_000_000_000  # columns, because a folded word would have a line break
# Without quotes, `_Loader` may read any other text as a number, or with other line breaks.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if _PLAIN.fullmatch(text) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def written_yaml(data: Mapping[str, Any], head: str) -> str:
    """Returns a document behind a comment. `read_yaml` reads the same content, each text byte for byte."""
    text = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NEVER_FOLDED)
    return f"# {head}\n{text}"


# The base of every mapping in an experiment's YAML.


class YamlSection(BaseModel):
    """A mapping in the YAML. It refuses unknown keys and wrong types, and converts nothing silently.

    A known key without a value counts as absent, as in the files that Determined writes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    # Keys that are accepted, so that an existing file works, and have no effect, with the reason for each
    not_used: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_left_out(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            key: item
            for key, item in value.items()
            if key not in cls.not_used and (item is not None or key not in cls.model_fields)
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for name, field in schema.get("properties", {}).items():
            takes_anything = not field.keys() - set(_AROUND_A_TYPE)
            if name not in schema.get("required", ()) and not takes_anything:
                schema["properties"][name] = _or_nothing(field)
        for name, why in cls.not_used.items():
            schema["properties"][name] = {"default": None, "description": f"Not used: {why}."}
        return schema


_AROUND_A_TYPE = ("default", "description", "title")


def _or_nothing(field: JsonSchemaValue) -> JsonSchemaValue:
    nothing = {"type": "null"}
    around = {key: value for key, value in field.items() if key in _AROUND_A_TYPE}
    kinds = field.get("anyOf") or [{key: value for key, value in field.items() if key not in around}]
    return {"anyOf": kinds if nothing in kinds else [*kinds, nothing], **around}
