"""One check of `zerotune doctor`, with its remedy."""

from dataclasses import dataclass
from enum import Enum


class Verdict(str, Enum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        name: of the checked thing.
        verdict: `fail` if a study would fail or hang; `warn` if it may, or would be slower than necessary.
        said: the finding, in one sentence.
        remedy: how to mend it. Empty if there is nothing to mend.
    """

    name: str
    verdict: Verdict
    said: str
    remedy: str = ""


def ok(name: str, said: str) -> Check:
    """Returns a check without a problem."""
    return Check(name, Verdict.OK, said)


def warn(name: str, said: str, remedy: str) -> Check:
    """Returns a check with a possible problem."""
    return Check(name, Verdict.WARN, said, remedy)


def fail(name: str, said: str, remedy: str) -> Check:
    """Returns a check with a certain problem."""
    return Check(name, Verdict.FAIL, said, remedy)
