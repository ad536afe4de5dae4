"""The user's command as MLflow and Prefect get it: no free text, because any of it may be a secret.

No list of names can tell every secret. So a word is sent only if it cannot be one: the name of an option, a number, a
switch, a launcher, or the path of an existing file. A number may be a PIN, unless it is a fraction, a power of two, of
three digits before its zeros, or of a launcher's option.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trial_lib.command.launchers import LAUNCHERS, python_programs
from trial_lib.secrets.by_name import REDACTED, redact

_COMMANDS = ("command", "best_command", "entrypoint")
"""The keys in records and parameters that have a command, as a list or as text."""
_OPTION = re.compile(r"--[A-Za-z][\w.-]*|-[A-Za-z]{1,2}|--")
_QUOTED_COMMAND = re.compile(r"`([^`\n]+ [^`\n]+)`")
_NAMED = re.compile(r"(--?[A-Za-z][\w.-]*=|[A-Za-z_]\w*=|\+{0,2}[A-Za-z_][\w.]*=)(.*)", re.DOTALL)
_NUMBERS = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?([,:x][-+]?[\d.]+(e[-+]?\d+)?)*|localhost:[\d,]+", re.IGNORECASE)
_DIGITS, _LONG = 3, 20
_FILE = re.compile(r"[\w./~-]+\.(py|sh|json|ya?ml|toml|cfg)")
_SWITCHES = ("true", "false", "none", "null", "auto", "cpu", "gpu", "cuda", "no", "yes", "on", "off")
_NUMERIC_TYPES = ("fp32", "fp16", "bf16", "fp8", "float32", "float16", "bfloat16")
_SHELL = ("cd", "unset", "export", "env", "&&", ";", "\\")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(:[A-Za-z_]\w*)?")


def sent_words(words: Sequence[str], folder: Path) -> list[str]:
    """Returns the words of a command, with `<redacted>` for free text.

    Args:
        words: of the command.
        folder: of its relative paths.
    """
    known = _launcher_words()
    options = {option for launcher in LAUNCHERS.values() for option in launcher.options}
    shown: list[str] = []
    for word in redact({"": list(words)})[""]:
        named = _NAMED.fullmatch(word)
        of_launcher = (named[1].rstrip("=") if named else "".join(shown[-1:])) in options
        if named and not _is_sent(named[2], folder, of_launcher):
            shown.append(named[1] + REDACTED)
        elif (
            named
            or _is_sent(word, folder, of_launcher)
            or _OPTION.fullmatch(word)
            or word in (*options, *_SHELL, REDACTED)
            or os.path.basename(word) in (*known, *python_programs())  # noqa: PTH119 - a word
            or (shown[-1:] in (["-m"], ["--module"]) and _MODULE.fullmatch(word))
        ):
            shown.append(word)
        else:
            shown.append(REDACTED)
    return shown


def sent_command(text: str, folder: Path) -> str:
    """Returns the lines of a command with `<redacted>` for free text, and without comments."""
    return "\n".join(_sent_line(line, folder) for line in text.splitlines() if not line.lstrip().startswith("#"))


def sent_document(value: Any, folder: Path, key: str = "") -> Any:
    """Returns a document of JSON in which each command is as `sent_words` has it."""
    if isinstance(value, dict):
        return {name: sent_document(inner, folder, name) for name, inner in value.items()}
    if key in _COMMANDS and isinstance(value, str):
        return sent_command(value, folder)
    if isinstance(value, (list, tuple)):
        if key in _COMMANDS:
            return sent_words([str(word) for word in value], folder)
        return [sent_document(inner, folder) for inner in value]
    return sent_text(value) if isinstance(value, str) else value


def sent_text(text: str) -> str:
    """Returns a text in which each command between backquotes is as `sent_words` has it."""

    def shown(found: re.Match[str]) -> str:
        named = {Path(word).name for word in found[1].split()}
        starts = {*_launcher_words(), *python_programs()}
        return f"`{sent_command(found[1], Path())}`" if named & starts else found[0]

    return _QUOTED_COMMAND.sub(shown, text)


def _launcher_words() -> set[str]:
    return {word for launcher in LAUNCHERS.values() for spelled in launcher.programs for word in spelled.split()}


def _sent_line(line: str, folder: Path) -> str:
    try:
        words = shlex.split(line)
    except ValueError:
        return REDACTED
    shown = sent_words(words, folder)
    return " ".join(word if word in _SHELL or REDACTED in word else shlex.quote(word) for word in shown)


def _is_sent(value: str, folder: Path, of_launcher: bool) -> bool:
    if _NUMBERS.fullmatch(value) and (of_launcher or all(map(_is_measure, re.split("[,:x]", value)))):
        return True
    if _FILE.fullmatch(value) or value.lower() in ("", *_SWITCHES, *_NUMERIC_TYPES):
        return True
    try:
        return (folder / value).exists()
    except (OSError, ValueError):
        return False


def _is_measure(number: str) -> bool:
    digits = number.lstrip("+-")
    if not digits.isdigit() or len(digits.rstrip("0")) <= _DIGITS:
        return True
    return len(digits) < _LONG and int(digits).bit_count() == 1
