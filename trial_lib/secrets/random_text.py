"""Finds text that was drawn at random, as keys and tokens of services are, whatever they are called."""

import re
from itertools import pairwise

_SHORTEST = 16
_RUN = re.compile(r"[A-Za-z0-9+/_=%~-]{16,}")
_PIECE = re.compile(r"[A-Za-z0-9]+")
_HASH = re.compile(r"[0-9a-f]{32,64}")
# Of neighbouring characters, the share that differ in kind (capital, small letter, digit). Of random letters and digits
# it is 0.62, of random hexadecimal ones 0.47, and of names in programs mostly below 0.2.
_CHANGES, _CHANGES_ACROSS = 0.3, 0.45


def without_random(text: str, instead: str) -> str:
    """Returns a text with another in the place of random parts. A hash in a path stays, because it names a file."""

    def shown(found: re.Match[str]) -> str:
        run = found[0]
        before = text[max(0, found.start() - 1) : found.start()]
        if "/" in run and (run.startswith("/") or before in (".", ":", "~")):
            parts = run.split("/")
            return "/".join(part if _HASH.fullmatch(part) or not _is_random(part) else instead for part in parts)
        if not _is_random(run):
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
    return len(joined) >= _SHORTEST and len(kinds) == 3 and _changes(joined) >= _CHANGES_ACROSS


def _changes(text: str) -> float:
    return sum(_kind(one) != _kind(other) for one, other in pairwise(text)) / len(text)


def _kind(character: str) -> int:
    return 0 if character.isdigit() else 1 if character.isupper() else 2
