"""What looks like a secret, among environment variables and in all that an experiment holds, kept from other people."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_WORD = r"(?:token|secret|passw(?:or)?d|passphrase|pgpass|_pwd|credential|key|auth)s?(?![a-z])"
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)
# A number under one of the other names counts or measures: max_tokens, key_dim.
_SECRET_NUMBER = re.compile(r"secret|passw(or)?d|passphrase|pgpass|_pwd|credential", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"[^\s'\"=]*://[^/@\s]*:[^/@\s]+@[^\s'\"]*")
_SECRET_ASSIGNMENT = re.compile(rf"(?P<name>[\w-]*{_WORD}[\w-]*)=", re.IGNORECASE)
# `NAME=value`, `--name=value` and `--name value`.
_IN_COMMAND = re.compile(
    rf"(?<![\w-])(?P<name>[\w-]*{_WORD}[\w-]*=|--?[\w-]*{_WORD}[\w-]*\s+(?!-))(\"[^\"]*\"|'[^']*'|\S+)",
    re.IGNORECASE,
)


def redact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values fit for logs, tags and reports: what looks like a secret is left out, however deep it stands.

    A name says so (`HF_TOKEN`, `api_key`, `registry_auth`), an address with a password in it, or a command that assigns
    such a name or has such an option.

    Args:
        values: environment variables, hyperparameters, or a whole experiment, by name. It is not changed.

    Example:
        >>> redact({"HF_TOKEN": "hf_abc", "TOKENIZERS_PARALLELISM": "false", "wandb": {"api_key": "abc"}})
        {'HF_TOKEN': '<redacted>', 'TOKENIZERS_PARALLELISM': 'false', 'wandb': {'api_key': '<redacted>'}}
    """
    return {name: _shown(value, (str(name),)) for name, value in values.items()}


def redact_text(text: str) -> str:
    """Returns a text, such as a command, without the secrets that it names and without addresses with a password.

    Example:
        >>> redact_text("HF_TOKEN=hf_abc python3 train.py --api_key abc --lr 1")
        'HF_TOKEN=<redacted> python3 train.py --api_key <redacted> --lr 1'
    """
    return _IN_COMMAND.sub(rf"\g<name>{REDACTED}", _URL_WITH_PASSWORD.sub(REDACTED, text))


def _shown(value: Any, names: tuple[str, ...]) -> Any:
    """Returns a value as it may be shown.

    Args:
        value: the value.
        names: those that it stands under: everything below a secret's name is one.
    """
    if isinstance(value, Mapping):
        return {name: _shown(inner, (*names, str(name))) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return _shown_list(value, names)
    if value is None or isinstance(value, bool):
        return value
    secret_name = _SECRET_NAME if isinstance(value, str) else _SECRET_NUMBER
    if any(secret_name.search(name) for name in names):
        return REDACTED
    return redact_text(value) if isinstance(value, str) else value


def _shown_list(values: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
    """Returns a list as it may be shown: it may hold assignments, or the words of a command."""
    shown: list[Any] = []
    option = ""
    for value in values:
        assignment = _SECRET_ASSIGNMENT.match(value) if isinstance(value, str) else None
        shown.append(f"{assignment['name']}={REDACTED}" if assignment else _shown(value, (*names, option)))
        option = value if isinstance(value, str) and value.startswith("-") and not assignment else ""
    return shown
