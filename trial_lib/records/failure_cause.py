"""The common part of the reasons of trials that ended the same way."""

import re

# Paths and numbers differ between such reasons.
_PATH = re.compile(r"(?<![\w.])/[^\s:;,'\")]+")
_NUMBER = re.compile(r"\d[\d,.]*")
_LOG = re.compile(r"\s*Log: .*")


def as_sentence(reason: str) -> str:
    """Returns a reason with a full stop, so that another sentence can follow. An exception's message seldom has one.

    No reason stays none.

    Example:
        >>> as_sentence("The program raised KeyError: 'labels'"), as_sentence("Did it end?")
        ("The program raised KeyError: 'labels'.", 'Did it end?')
    """
    said = reason.rstrip()
    return said if not said or said.endswith((".", "!", "?", ":")) else f"{said}."


def cause_of(reason: str) -> str:
    """Returns the reason of a failed trial without its paths and numbers.

    Example:
        >>> cause_of("Rank 1 left no result. Log: /tmp/trials/0003/rank1.log")
        'Rank # left no result. Log: PATH'
    """
    return _NUMBER.sub("#", _PATH.sub("PATH", reason))


def without_log(reason: str) -> str:
    """Returns the reason of a failed trial without the path of its log."""
    return _LOG.sub("", reason)
