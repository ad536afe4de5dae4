"""One thing that `zerotune doctor` has looked at, and how to mend it."""

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """What a check has come to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's.

    Attributes:
        name: what was looked at.
        verdict: `fail` where a study would fail or hang, `warn` where it may, or is slower than it need be.
        said: one sentence on what was found.
        remedy: how to mend it; empty where there is nothing to mend.
    """

    name: str
    verdict: Verdict
    said: str
    remedy: str = ""


def ok(name: str, said: str) -> Check:
    """Returns a check that has found nothing wrong."""
    return Check(name, Verdict.OK, said)


def warn(name: str, said: str, remedy: str) -> Check:
    """Returns a check that has found what may go wrong."""
    return Check(name, Verdict.WARN, said, remedy)


def fail(name: str, said: str, remedy: str) -> Check:
    """Returns a check that has found what goes wrong."""
    return Check(name, Verdict.FAIL, said, remedy)
