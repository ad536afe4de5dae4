"""Finds values that look like secrets, in environment variables and in experiments, and hides them."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

# Finds text that was drawn at random, as keys and tokens of services are, whatever they are called.

_SHORTEST = 16
_RUN = re.compile(r"[A-Za-z0-9+/_=%~-]{16,}")
_PIECE = re.compile(r"[A-Za-z0-9]+")
_HASH = re.compile(r"[0-9a-f]{32,64}")
# Numbers in memory, symbols of C++, files of a data set (`train-fb21cb2dc3cbb0a2.parquet`), images of containers, and a
# model's revision, behind its option or in the name of a module.
_NAMES = re.compile(
    r"(?<![\w/+-])(?:0x[0-9a-f]{1,16}|_Z[NTKLSV0-9]\w+)(?![\w/+=-])|[0-9a-f]{16,64}(?=\.[a-z]{2,11}(?![\w.-]))"
    r"|(?:(?<=sha256:)|(?<=revision[ =]))[0-9a-f]{40,64}(?!\w)|(?<=\w\.)[0-9a-f]{40}(?=\.[a-z])"
)
# Of neighbouring characters, the share that differ in kind (capital, small letter, digit). Of random letters and digits
# it is 0.62, of random hexadecimal ones 0.47, and of names in programs mostly below 0.2.
_CHANGES, _CHANGES_ACROSS = 0.3, 0.45
# Of a licence key, which has capitals and digits in groups: 0.4.
_CHANGES_IN_GROUPS = 0.34
_GROUPS = re.compile(r"[A-Z0-9]{4,8}(?:-[A-Z0-9]{4,8}){2,}")


def without_random(text: str, instead: str) -> str:
    """Returns a text with another in the place of random parts. A hash in a path stays, because it names a file."""
    judged = _NAMES.sub(lambda found: "n" * len(found[0]), text)

    def shown(found: re.Match[str]) -> str:
        run = found[0]
        before = text[max(0, found.start() - 1) : found.start()]
        if "/" in run and (run.startswith("/") or before in (".", ":", "~")):
            parts = zip(run.split("/"), judged[found.start() : found.end()].split("/"), strict=True)
            return "/".join(part if _HASH.fullmatch(part) or not _is_random(seen) else instead for part, seen in parts)
        if not _is_random(judged[found.start() : found.end()]):
            return run
        # `sig=`, `X-Amz-Signature=`: the name stays.
        name, equals, value = run.partition("=")
        return f"{name}={instead}" if equals and value.strip("=") and not _is_random(name) else instead

    return _RUN.sub(shown, text)


def _is_random(run: str) -> bool:
    pieces = _PIECE.findall(run)
    if any(len(piece) >= _SHORTEST and not piece.isalpha() and _changes(piece) >= _CHANGES for piece in pieces):
        return True
    joined = "".join(pieces)
    kinds = {_kind(character) for character in joined}
    least = _CHANGES_IN_GROUPS if _GROUPS.fullmatch(run) else _CHANGES_ACROSS if len(kinds) == 3 else 1.0
    return len(joined) >= _SHORTEST and _changes(joined) >= least


def _changes(text: str) -> float:
    return sum(_kind(one) != _kind(other) for one, other in pairwise(text)) / len(text)


def _kind(character: str) -> int:
    return 0 if character.isdigit() else 1 if character.isupper() else 2


REDACTED = "<redacted>"

# A short word ends a name, as in DB_PASS: `pin_memory` and `bypass` are others.
_SHORT_WORD = r"(?<![a-z])(?:pass|pw|(?<=[_-])pwd|tok|pin|psk|otp|sig|jwt|sas|pat|dsn|creds?)(?![\w-]*[a-z])"
_PASSWORD = rf"secret|passw(?:or)?d|passphrase|pgpass|passcode|credential|{_SHORT_WORD}"
_CERTAIN = rf"token|(?:api|access|private)[_-]?key|signature|cookie|webhook|{_PASSWORD}"
_WORD = rf"(?:{_CERTAIN}|key|auth)s?(?![a-z])"
_SECRET_NAME = re.compile(_WORD, re.IGNORECASE)
# A number under one of the other names counts or measures: max_tokens, key_dim.
_SECRET_NUMBER = re.compile(rf"{_PASSWORD}|(?:api|access|private)[_-]?key(?![\w-]*[a-z])", re.IGNORECASE)
# A word under one of the other names is one, such as DB_KEY=status.
_CERTAIN_NAME = re.compile(_CERTAIN, re.IGNORECASE)
_CERTAIN_OR_AUTH = re.compile(rf"{_CERTAIN}|auth", re.IGNORECASE)
_ORDINARY = re.compile(r"[A-Za-z]+(?:[-_. /][A-Za-z]+)*")
_LONGEST_WORD = 12
_SEVERAL = re.compile(rf"-[\w-]*{_WORD}(?<=s)$", re.IGNORECASE)
# A password may contain characters that should be escaped, such as "/". A port with a path behind it is no password.
_URL_WITH_PASSWORD = re.compile(
    r"(?<![\w+.:-])[\w+.:-]*://(?:[^/@\s'\"]{0,200}:(?!\d+(?:/|$)|\*+@)[^\s'\"]{1,500}|[^/@:\s'\"]{16,500})@[^\s'\"]*"
)
# The lookahead finds the word before the name is matched, so that the time is linear in the length of a name.
_SECRET_ASSIGNMENT = re.compile(rf"(?=[\w-]*{_WORD})(?P<name>[\w-]+)=", re.IGNORECASE)
# `NAME=value`, `--name=value` and `--name value`.
_IN_COMMAND = re.compile(
    rf"(?<![\w-])(?=[\w-]*{_WORD})(?P<name>[\w-]+=|-[\w-]+\s+(?!-))(\"[^\"]*\"|'[^']*'|\S+)", re.IGNORECASE
)
# `-k value`: a flag of one letter differs from program to program, so the value has to look like a key.
_KEY_FLAG = re.compile(r"(?P<name>(?<!\S)-k[\s=]+)(['\"]?(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}['\"]?)(?!\S)")
# `-u name -p value`, and programs whose `-p` or `-a` is a password: `sshpass -p`, `redis-cli -a`. Python's `-u` has no
# value: an option or a script follows it.
_PASSWORD_FLAG = re.compile(
    r"(?P<name>(?<!\S)(?:-u[ =]?(?!-|\S+\.(?:py|sh)['\"]?\s)\S+\s+-p[ =]?|(?:sshpass|redis-cli)\b[^|;\n]*?\s-[pa]\s+))"
    r"(['\"]?[^\s'\"-][^\s'\"]*['\"]?)"
)
# `passphrase: several words`
_PASSPHRASE = re.compile(r"(?P<name>\bpassphrase\s*[:=]\s*)([^\n'\"]+)", re.IGNORECASE)
# `"api_key": "value"`, as JSON and Python spell it.
_QUOTED_PAIR = re.compile(
    rf"(?P<name>(?P<quote>['\"])(?=[\w.-]*{_WORD})[\w.-]+(?P=quote)\s*:\s*)(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')",
    re.IGNORECASE,
)
# `Authorization: Bearer value`, `X-Api-Key: value`, `password: value`, `token = value`, and a line of .netrc.
_HEADER = re.compile(
    r"(?P<name>(?:(?<![\w-])(?:(?:proxy-)?authorization|[\w-]*api[_-]?key|[\w-]*(?:password|secret|passphrase|passcode)"
    r"|(?:access_|auth_|api_)?token|pass|pw|pwd|pin|tok|x-[\w-]*(?:key|token))\s*[:=]\s*"
    r"|\blogin\s+\S+\s+password\s+|(?<!\S)-{1,2}u(?:ser)?[\s=]+(?=\S+:))"
    r"(?:(?:bearer|basic|token|digest)\s+)?)([^\s'\"{}\[\],]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<name>\bbearer\s+)([\w.~+/-]{8,}=*)", re.IGNORECASE)
# Keys of well-known services, under any name.
_ISSUED = re.compile(
    r"(?P<name>)(?<![\w-])(hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|A[KS]IA[0-9A-Z]{16}|glpat-[\w-]{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+|\w{8,}\.atlasv1\.\w+)"
)
_COOKIE = re.compile(r"(?P<name>\b(?:set-)?cookie\s*:\s*)([^\n'\"]+)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"(?P<name>)(-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z))", re.DOTALL
)
# Counts, measures, switches and special tokens (`</s>`, `<|pad|>`), as text.
_MEASURE = r"[-+]?(?:\d*\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)|true|false|none|null|auto|</?[\w|]+>"
_PLAIN = re.compile(rf"[-+]?\d{{1,9}}|{_MEASURE}", re.IGNORECASE)
# No password is one of these.
_NO_PASSWORD = re.compile(_MEASURE, re.IGNORECASE)
# MLflow's parameter for a saved view, in the links that ZeroTune prints.
_PUBLIC_NAMES = ("viewStateShareKey=",)
_PATTERNS = (
    *(_PRIVATE_KEY, _COOKIE, _PASSPHRASE, _IN_COMMAND, _KEY_FLAG, _PASSWORD_FLAG, _QUOTED_PAIR, _HEADER, _BEARER),
    _ISSUED,
)


def redact(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values fit for logs, tags and reports, without those that look like secrets, at any depth.

    A value looks like a secret by its name (`HF_TOKEN`, `api_key`, `registry_auth`). So do an address with a password,
    and a command that assigns such a name or has such an option.

    Example:
        >>> redact({"HF_TOKEN": "hf_abc", "TOKENIZERS_PARALLELISM": "false", "wandb": {"api_key": "abc"}})
        {'HF_TOKEN': '<redacted>', 'TOKENIZERS_PARALLELISM': 'false', 'wandb': {'api_key': '<redacted>'}}
    """
    return _Redaction().values(values)


def redact_text(text: str) -> str:
    """Returns a text, such as a command, without the secrets that it names and without addresses with a password.

    Example:
        >>> redact_text("HF_TOKEN=hf_abc python3 train.py --api_key abc --lr 1")
        'HF_TOKEN=<redacted> python3 train.py --api_key <redacted> --lr 1'
    """
    return _Redaction().text(text)


def secrets_in(values: Mapping[str, Any]) -> list[str]:
    """Returns the secrets that `redact` hides in values.

    Example:
        >>> secrets_in({"HF_TOKEN": "hf_abc", "entrypoint": "train.py --api_key abc"})
        ['hf_abc', 'abc']
    """
    redaction = _Redaction()
    redaction.values(values)
    return redaction.left_out


class _Redaction:
    def __init__(self) -> None:
        self.left_out: list[str] = []

    def values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._shown(value, (str(name),)) for name, value in values.items()}

    def text(self, text: str) -> str:
        if "://" in text:
            text = _URL_WITH_PASSWORD.sub(self._leave_out, text)
        for pattern in _PATTERNS:
            text = pattern.sub(self._leave_out, text)
        return without_random(text, REDACTED)

    def _leave_out(self, found: re.Match[str]) -> str:
        if found.re is _URL_WITH_PASSWORD:
            self.left_out.append(found[0])
            return REDACTED
        value = found[found.re.groups]
        is_public = found["name"] in _PUBLIC_NAMES and "=" not in value
        bare = value.strip("'\",)")
        # `key=lambda`, `DB_KEY=status`
        is_word = found.re is _IN_COMMAND and _is_word(bare) and not _CERTAIN_OR_AUTH.search(found["name"])
        if is_public or REDACTED in value or is_word or _is_plain(bare, found["name"]):
            return found[0]
        self._learn(value, found["name"] or "token")
        return f"{found['name']}{REDACTED}"

    def _learn(self, value: str, *names: str) -> None:
        # Adds a value to `left_out`, unless it is an ordinary word that nobody would choose as a secret.
        if not _ORDINARY.fullmatch(value) or (any(map(_CERTAIN_NAME.search, names)) and not _is_word(value)):
            self.left_out.append(value)

    def _shown(self, value: Any, names: tuple[str, ...]) -> Any:
        """Everything below a secret's name is secret."""
        if isinstance(value, Mapping):
            return {name: self._shown(inner, (*names, str(name))) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return self._list(value, names)
        if value is None or isinstance(value, bool):
            return value
        if any(map(_SECRET_NAME.search, names)) and not _is_plain(str(value), *names):
            self._learn(value if isinstance(value, str) else json.dumps(value, default=str), *names)
            return REDACTED
        return self.text(value) if isinstance(value, str) else value

    def _list(self, values: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
        # A list without secrets. It may contain assignments, or the words of a command.
        shown: list[Any] = []
        option = ""
        for value in values:
            assignment = _SECRET_ASSIGNMENT.match(value) if isinstance(value, str) else None
            if assignment and not _is_plain(value[assignment.end() :], assignment["name"]):
                self._learn(value[assignment.end() :], assignment["name"])
                shown.append(f"{assignment['name']}={REDACTED}")
            elif option == "-k" and isinstance(value, str) and _KEY_FLAG.match(f"-k {value}"):
                self.left_out.append(value)
                shown.append(REDACTED)
            else:
                shown.append(self._shown(value, (*names, option)))
            if not isinstance(value, str) or value.startswith("-") or assignment or not _SEVERAL.match(option):
                option = value if isinstance(value, str) and value.startswith("-") and not assignment else ""
        return shown


def _is_word(value: str) -> bool:
    return value.isalpha() and len(value) < _LONGEST_WORD


def _is_plain(value: str, *names: str) -> bool:
    if any(map(_SECRET_NUMBER.search, names)):
        return bool(_NO_PASSWORD.fullmatch(value))
    return bool(_PLAIN.fullmatch(value))
