"""Finds text that was drawn at random, as keys and tokens of services are, whatever they are called."""

import re
from itertools import pairwise

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
