"""The common part of the reasons of trials that ended the same way."""

import re

# Paths and numbers differ between such reasons.
_PATH = re.compile(r"(?<![\w.])/[^\s:;,'\")]+")
_NUMBER = re.compile(r"\d[\d,.]*")


def cause_of(reason: str) -> str:
    """Returns the reason of a failed trial without its paths and numbers.

    Example:
        >>> cause_of("Rank 1 left no result. Log: /tmp/trials/0003/rank1.log")
        'Rank # left no result. Log: PATH'
    """
    return _NUMBER.sub("#", _PATH.sub("PATH", reason))
