"""Secrets whose values are known, hidden wherever they are written; and the command as MLflow and Prefect get it."""

import contextlib
import functools
import html
import json
import os
import re
import shlex
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from zerotune.trial_lib.inputs.launchers import LAUNCHERS, python_programs
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.inputs.yaml_document import read_yaml
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.secrets import REDACTED, redact, redact_text, secrets_in
from zerotune.trial_lib.records.folders import StudyPaths

# Hides secrets whose values are known, because a log may contain them without their names or in another spelling.

_SHORTEST = 6  # a shorter value also occurs in ordinary words
_SHORTEST_BEGINNING = 8  # of a value that the end of a text cuts off, and at least half of it
_USER_AND_PASSWORD = re.compile(r"://([^/@\s'\"]*?)(?::([^\s'\"]+))?@")
_IN_LIST = re.compile(r"[\[\]{}(),;\s'\"]+")
_USERS = ("USERNAME", "USER")


@dataclass(frozen=True)
class KnownSecrets:
    """Values that no output may contain."""

    values: tuple[str, ...] = ()  # the secrets in all their spellings, the longest first

    @classmethod
    def of(cls, experiment: Path, *records: Path) -> "KnownSecrets":
        """Returns the secrets of an experiment's YAML, and of this process's environment, which its trials inherit.

        `records` are JSON files with the typed command, or with values from the code.
        """
        return cls.within(*map(_document, (experiment, *records)))

    @classmethod
    def of_experiment(cls, experiment: Experiment) -> "KnownSecrets":
        """Includes those of its DeepSpeed configuration."""
        return cls.within(experiment.document.data, experiment.ds_config)

    @classmethod
    def of_study(cls, paths: StudyPaths) -> "KnownSecrets":
        return cls.of(paths.experiment, paths.record, paths.trial(0).result)

    @classmethod
    def within(cls, *documents: Mapping[str, Any]) -> "KnownSecrets":
        """Returns the secrets of documents such as an experiment's YAML, and of this process's environment."""
        found = [value for document in (os.environ, *documents) for value in secrets_in(document)]
        parts = {part for value in [*found, *_basic_credentials(os.environ)] for part in _parts(value)}
        # The folder's own path is no secret, whatever else has the same name.
        here = os.getcwd()  # noqa: PTH109 - a path that begins with a link is to stay as it is
        hidden = (part for part in parts if len(part) >= _SHORTEST and part not in here)
        spelled = {spelling for part in hidden for spelling in _spellings(part)}
        return cls(tuple(sorted(spelled, key=lambda value: (-len(value), value))))

    def __add__(self, other: "KnownSecrets") -> "KnownSecrets":
        return KnownSecrets(tuple(sorted({*self.values, *other.values}, key=lambda value: (-len(value), value))))

    def hide(self, text: str) -> str:
        return redact_text(self.hide_values(text))

    def hide_values(self, text: str) -> str:
        """Returns a text without these values. A beginning of a value at the end of a text is hidden as well."""
        if not self.values:
            return text
        whole = _any_of(self.values).sub(REDACTED, text)
        end = whole.rstrip(". …\n")
        for value in self.values:
            at = end.rfind(value[: max(_SHORTEST_BEGINNING, len(value) // 2)])
            if at >= 0 and value.startswith(end[at:]):
                return f"{end[:at]}{REDACTED}{whole[len(end) :]}"
        return whole

    def hide_in(self, document: Any) -> Any:
        """Returns a JSON document as `hide` has its texts, at any depth. Its keys stay, because programs read them."""
        return self._without(redact(document) if isinstance(document, Mapping) else redact({"": document})[""])

    def _without(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): self._without(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._without(inner) for inner in value]
        return self.hide_values(value) if isinstance(value, str) else value


class _OfProcess:
    secrets: KnownSecrets | None = None


def keep_secret(secrets: KnownSecrets) -> None:
    """Hides these secrets in all output of this process from now on."""
    _OfProcess.secrets = known_here() + secrets


def known_here() -> KnownSecrets:
    """Returns the secrets of this process's environment, and of the studies that it opened."""
    if _OfProcess.secrets is None:
        _OfProcess.secrets = KnownSecrets.within()
    return _OfProcess.secrets


def _document(file: Path) -> Mapping[str, Any]:
    # The content of a file; nothing if it is damaged or missing.
    try:
        document = json.loads(file.read_text()) if file.suffix == ".json" else read_yaml(file).data
    except (InputError, OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, Mapping) else {}


@functools.lru_cache(maxsize=8)
def _any_of(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, values)))


def _basic_credentials(environment: Mapping[str, str]) -> Iterator[str]:
    # `user:password` of variables such as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    for name, user in environment.items():
        stem, _, kind = name.rpartition("_")
        password = environment.get(f"{stem}_PASSWORD") if stem and kind in _USERS else None
        if password:
            yield f"{user}:{password}"


def _parts(value: str) -> Iterator[str]:
    bare = value.strip().strip("'\"")
    yield from (value, bare)
    for user, password in _USER_AND_PASSWORD.findall(value):
        if password:
            yield from (password, unquote(password), f"{user}:{password}", f"{unquote(user)}:{unquote(password)}")
        else:
            yield user
    if "://" in value:
        return
    with contextlib.suppress(ValueError):
        yield from _leaves(json.loads(bare))
    if bare.startswith(("[", "{", "(")) or "," in bare:
        yield from _IN_LIST.split(bare)
    yield from (line.strip() for line in value.splitlines())


def _leaves(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        for inner in document:
            yield from _leaves(inner)
    elif isinstance(document, str):
        yield document


def _spellings(value: str) -> Iterable[str]:
    content = value.encode(errors="surrogateescape")
    encoded = {encode(content).decode() for encode in (b64encode, urlsafe_b64encode)}
    return {
        value,
        quote(value, safe="", errors="replace"),
        quote(value, errors="replace"),
        quote_plus(value, errors="replace"),
        *encoded,
        *(text.rstrip("=") for text in encoded),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        shlex.quote(value).strip("'"),
        html.escape(value),
    }


# The user's command as MLflow and Prefect get it: no free text, because any of it may be a secret.

# The keys in records and parameters that have a command, as a list or as text.
_COMMANDS = ("command", "best_command", "entrypoint")
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
    """Returns the words of a command, with `<redacted>` for free text."""
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
    """Each command in it is as `sent_words` has it."""
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
    """Each command between backquotes is as `sent_words` has it."""

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
