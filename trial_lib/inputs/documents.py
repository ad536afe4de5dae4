"""The user's YAML, JSON and TOML files: their values, and edits that keep every other character."""

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

import yaml

from zerotune.trial_lib.messages.errors import InputError

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
REMOVED = object()
"""As the new value of a key: the key is taken out."""

_LONGEST_PATH = 1000

Key = tuple[str, ...]  # the path to a value, from the top. A number counts from 0 in a list.

# An anchor or a tag before a value belongs to the value.
_PROPERTIES = re.compile(r"([&!]\S*\s+)*")
_ALIAS = re.compile(r"\s*:\s*(\*[^\s,\]}]+)")
_SPECIAL = re.compile(r"[#,\[\]{}\n]|:\s|^\s|\s$")


def read_document(text: str, path: str) -> Any:
    """The content of a document, whose kind its path tells. Raises ValueError if it is not of that kind."""
    try:
        if PurePath(path).suffix == ".json":
            return json.loads(text)
        if PurePath(path).suffix == ".toml":
            import tomlkit

            return tomlkit.parse(text).unwrap()
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def leaves(node: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The values of a document that are neither mappings nor lists."""
    if isinstance(node, Mapping):
        for name, inner in node.items():
            yield from leaves(inner, (*key, str(name)))
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from leaves(inner, (*key, str(number)))
    else:
        yield key, node


def value_at(node: Any, key: Sequence[str]) -> Any:
    """The value of a key; None if there is none."""
    for step in key:
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def text_at(text: str, path: str, key: Sequence[str]) -> str | None:
    """The characters of a scalar in a document, with its quotes; None if there is none.

    Raises ValueError if it is not of the kind that its path tells.
    """
    if path.endswith(".toml"):
        value = value_at(read_document(text, path), key)
        return None if value is None or isinstance(value, (Mapping, list)) else json.dumps(value, default=str)
    try:
        node = _composed(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(error) from None
    for step in key:
        pair = _pair(node, step)
        if pair is None:
            return None
        node = pair[1]
    if not isinstance(node, yaml.ScalarNode):
        return None
    return text[_value_begin(text, node) : node.end_mark.index]


def edited(text: str, path: str, changes: Mapping[Key, Any], shared: bool = False) -> str:
    """A document with other values. A key that it does not have is added beside its siblings.

    Quotes, comments, order and line ends stay. A number in quotes stays in quotes. Raises InputError if that would
    change anything else, as with a value that an alias shares. With `shared` such a value changes for all of them.
    """
    content = read_document(text, path)
    for key, value in changes.items():
        before = value_at(content, key)
        new = str(value) if type(value) in (int, float) and _is_quoted_number(before) else value
        wanted = copy.deepcopy(content)
        try:
            _set(wanted, key, new)
            text = _toml_with(text, key, new) if path.endswith(".toml") else _with(text, key, new, path)
            content = wanted if shared else read_document(text, path)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
            # JSON may have keys that YAML refuses, such as one of a thousand characters.
            content = None
        if content != wanted:
            raise InputError(
                f"{'.'.join(key)} cannot be changed without another value.",
                where=f"{path}:{'.'.join(key)}",
                remedy="Write it as a value of its own, without an alias.",
            )
    return text


def with_whole_paths(text: str, file: Path, folder: Path) -> str:
    """A file's text for a copy elsewhere: what it names from its own folder, and not from `folder`, has a whole path.

    A document that it names beside itself has one too, because either may be meant.
    """
    for key, value in leaves(read_document(text, file.name)):
        if not isinstance(value, str) or not value or "\0" in value or len(value) > _LONGEST_PATH:
            continue
        named, other = (file.parent / value).resolve(), (folder / value).resolve()
        is_document = named.suffix in SUFFIXES and named == other
        with contextlib.suppress(OSError, InputError):
            if not PurePath(value).is_absolute() and named.exists() and (is_document or not other.exists()):
                text = edited(text, file.name, {key: str(named)})
    return text


def _is_quoted_number(value: Any) -> bool:
    # Text such as "auto" gives way to a number.
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _set(content: Any, key: Key, value: Any) -> None:
    for step, following in pairwise(key):
        if isinstance(content, list):
            content = content[int(step)]
        else:
            if value is REMOVED and following not in (content.get(step) or ()):
                return
            if content.get(step) is None:
                content[step] = {}
            content = content[step]
    if isinstance(content, list):
        content[int(key[-1])] = value
    elif value is REMOVED:
        content.pop(key[-1], None)
    else:
        content[key[-1]] = value


def _toml_with(text: str, key: Key, value: Any) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    _set(document, key, value)
    return tomlkit.dumps(document)


# YAML, and JSON, which is YAML. PyYAML tells where each value stands in the text.


def _composed(text: str) -> Any:
    # JSON may be indented with tabs, which YAML refuses.
    return yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)


def _pair(node: Any, step: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if getattr(pair[0], "value", None) == step), None)
    if isinstance(node, yaml.SequenceNode) and step.isdecimal() and int(step) < len(node.value):
        found = node.value[int(step)]
        return found, found
    return None


def _value_begin(text: str, node: yaml.Node) -> int:
    properties = _PROPERTIES.match(text, node.start_mark.index, node.end_mark.index)
    return int(properties.end() if properties else node.start_mark.index)


def _span(text: str, key: yaml.Node, value: yaml.Node) -> tuple[int, int]:
    # The characters of a value. That of an alias is the alias, and not what it stands for.
    alias = _ALIAS.match(text, key.end_mark.index) if value.start_mark.index < key.start_mark.index else None
    if alias is not None:
        return alias.span(1)
    return _value_begin(text, value), _end(text, value)


def _end(text: str, node: yaml.Node) -> int:
    # PyYAML ends a block with the blank lines and comments behind it.
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _span(text, *last)[1] if isinstance(last, tuple) else _end(text, last)
    return int(node.end_mark.index)


def _with(text: str, key: Key, value: Any, path: str) -> str:
    node, is_json = _composed(text), path.endswith(".json")
    for position, step in enumerate(key):
        pair = _pair(node, step)
        if pair is None:
            if value is REMOVED:
                return text
            for inner in reversed(key[position + 1 :]):
                value = {inner: value}
            return _added(text, node, step, value, is_json)
        if position < len(key) - 1 and getattr(pair[1], "tag", "").endswith(":null"):
            for inner in reversed(key[position + 1 :]):
                value = {inner: value}
            return _replaced(text, pair, value, is_json)
        if position == len(key) - 1 and value is REMOVED:
            return _without(text, node, pair)
        if position == len(key) - 1:
            return _replaced(text, pair, value, is_json)
        node = pair[1]
    return text


def _replaced(text: str, pair: tuple[yaml.Node, yaml.Node], value: Any, is_json: bool) -> str:
    begin, end = _span(text, *pair)
    quote = text[begin : begin + 1] if isinstance(value, str) and text[begin : begin + 1] == "'" else ""
    new = f"'{value}'" if quote and "'" not in value and "\n" not in value else _written(value, is_json)
    if text[begin : begin + 1] == '"' and isinstance(value, str):
        new = json.dumps(value, ensure_ascii=False)
    return f"{text[:begin]}{' ' if begin == end else ''}{new}{text[end:]}"


def _written(value: Any, is_json: bool) -> str:
    if not isinstance(value, str) or is_json:
        return json.dumps(value, ensure_ascii=False)
    try:
        is_plain = bool(yaml.safe_load(value) == value) and not _SPECIAL.search(value)
    except yaml.YAMLError:
        is_plain = False
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def _added(text: str, node: yaml.MappingNode, name: str, value: Any, is_json: bool) -> str:
    written = f"{json.dumps(name) if is_json else name}: {_written(value, is_json)}"
    first = node.value[0][0].start_mark.index if node.value else node.end_mark.index - 1
    if node.flow_style:
        if not node.value:
            return text[:first] + written + text[first:]
        end = _span(text, *node.value[-1])[1]
        # Keys that stand in lines of their own get another line.
        between = text[node.start_mark.index + 1 : first]
        return text[:end] + "," + (between if "\n" in between else " ") + written + text[end:]
    end = _span(text, *node.value[-1])[1]
    line_end = "\r\n" if "\r\n" in text else "\n"
    indent = " " * node.value[0][0].start_mark.column
    if text[end - 1 : end] == "\n":
        return f"{text[:end]}{indent}{written}{line_end}{text[end:]}"
    rest = re.compile(r"[^\r\n]*").match(text, end)
    end = end if rest is None else rest.end()
    return f"{text[:end]}{line_end}{indent}{written}{text[end:]}"


def _without(text: str, node: yaml.MappingNode, pair: tuple[yaml.Node, yaml.Node]) -> str:
    pairs = node.value
    position = next(at for at, each in enumerate(pairs) if each is pair)
    begin, end = pair[0].start_mark.index, _span(text, *pair)[1]
    if node.flow_style:
        if position + 1 < len(pairs):
            end = pairs[position + 1][0].start_mark.index
        elif position:
            begin = _span(text, *pairs[position - 1])[1]
        return text[:begin] + text[end:]
    begin = text.rfind("\n", 0, begin) + 1
    following = text.find("\n", end)
    return text[:begin] + (text[following + 1 :] if following >= 0 else "")
