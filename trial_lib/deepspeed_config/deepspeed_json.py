"""Reads a DeepSpeed configuration from a file, or from the text that DeepSpeed accepts instead.

A rank imports this module from the user's environment: standard library only.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import read_bounded

_NAME = re.compile(r"[A-Za-z][\w-]{0,254}")  # what is longer names no file
# A bracket, after comments.
_OBJECT = re.compile(r"(?:\s|#[^\n]*\n|//[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Returns the DeepSpeed configuration in a JSON file. Comments and trailing commas are allowed, as in DeepSpeed.

    Raises:
        InputError: the file is missing or unreadable, is not JSON (with line and column), holds no object, or has a key
            twice. JSON would silently keep the last one.
    """
    try:
        text = read_bounded(path)
    except FileNotFoundError:
        raise InputError(
            "the DeepSpeed configuration does not exist.",
            where=str(path),
            remedy="Name an existing JSON file, relative to the model directory.",
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise InputError(
            f"the DeepSpeed configuration cannot be read ({error}).",
            where=str(path),
            remedy="Make it a readable UTF-8 file.",
        ) from None
    return _parse(text, str(path))


def read_named_config(value: str, folder: Path, *, where: str) -> dict[str, Any]:
    """Returns the DeepSpeed configuration that the value of an argument names.

    Args:
        value: the path of a file, or the configuration itself: as JSON, which Hugging Face takes, or as the base64 of
            its JSON, which DeepSpeed takes.
        folder: the folder that relative paths start from.
        where: the place of the value, for errors.

    Raises:
        InputError: it is none of them, or is not usable (see `read_deepspeed_json`).
    """
    try:
        is_path = (folder / value).exists()
    except (OSError, ValueError):  # too long for a path
        is_path = False
    if is_path:
        return read_deepspeed_json(folder / value)
    text = value if value.lstrip().startswith("{") else _decoded(value)
    if text:
        return _parse(text, where)
    raise InputError(
        f"the DeepSpeed configuration {value} does not exist.",
        where=where,
        remedy=f"Name an existing JSON file, relative to {folder}.",
    )


def is_programs_own_name(value: str, folder: Path, script: str | None = None) -> bool:
    """Returns whether a value names a configuration that only the program can find, as `zero2` does in ms-swift.

    Such a name is one word, or a file beside the script. Any other path with a folder or an ending is mistyped.

    Args:
        value: of an argument.
        folder: the folder that relative paths start from.
        script: the script, relative to the folder; None if there is none.
    """
    try:
        is_beside = bool(value and script) and (folder / str(script)).parent.joinpath(value).is_file()
        is_name = bool(_NAME.fullmatch(value)) and not _decoded(value)
        return (is_beside or is_name) and not (folder / value).exists()
    except (OSError, ValueError):  # no path
        return False


def named_alike(value: str, config: Mapping[str, Any], path: Path) -> str:
    """Returns the value that names another configuration in the form that the user chose.

    Code that decodes its configuration itself takes no path.

    Args:
        value: the user's, of any form that `read_named_config` reads.
        config: the other configuration.
        path: the file of the other configuration.
    """
    if value.lstrip().startswith("{"):
        return json.dumps(config)
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode() if _decoded(value) else str(path)


def _decoded(value: str) -> str:
    """Returns the text of an object that is written in base64; empty for anything else."""
    try:
        decoded = base64.urlsafe_b64decode(value).decode()
    except (binascii.Error, ValueError):
        return ""
    return decoded if decoded.lstrip().startswith("{") else ""


def _parse(text: str, where: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(pairs)
        if len(section) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(
                f'the key "{twice}" occurs twice in one object.', where=where, remedy="Keep one of the two."
            )
        return section

    try:
        config = json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        config = _parse_hjson(text, where, refuse_duplicates, error)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"not usable JSON: {error}.", where=where, remedy="Mend the JSON.") from None
    if not isinstance(config, dict):
        raise InputError(
            f"a DeepSpeed configuration is a JSON object, this is {type(config).__name__}.",
            where=where,
            remedy='Wrap it in { } with DeepSpeed\'s keys, such as "train_micro_batch_size_per_gpu".',
        )
    return config


def _parse_hjson(text: str, where: str, hook: Callable[..., dict[str, Any]], mistake: json.JSONDecodeError) -> Any:
    """Returns the value of a text that is not plain JSON, as DeepSpeed reads it."""
    # DeepSpeed depends on it, but most configurations do not need it.
    import hjson

    at = mistake.msg, mistake.lineno, mistake.colno
    if not _OBJECT.match(text):
        # Hjson needs no outer brackets, so a YAML file would be accepted.
        raise InputError(f"not valid JSON: {at[0]}.", where=f"{where}:{at[1]}:{at[2]}", remedy="Mend the JSON there.")
    try:
        config = hjson.loads(text, object_pairs_hook=hook)
    except hjson.HjsonDecodeError as error:
        config, at = None, (error.msg, error.lineno, error.colno)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):  # words without brackets are a text
        what, line, column = at
        raise InputError(f"not valid JSON: {what}.", where=f"{where}:{line}:{column}", remedy="Mend the JSON there.")
    return config
