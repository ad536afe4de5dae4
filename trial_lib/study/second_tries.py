"""Second tries: a failure that may be chance is tried once more before the search learns of it. Pure.

A full disk, a lost connection or a bug that strikes now and then says nothing about settings. A failure that a second
try has repeated is taken as one of the settings. Then others that fail alike are not tried again.
"""

from collections.abc import Callable, Sequence

from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.failure_cause import cause_of, without_log
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.study.kept.history import Asked, AskedSweep, Event, Told


class SecondTries:
    """The candidates of a search that run once more. It depends only on the results, so a resumed study has the same.

    Attributes:
        waiting: candidates whose second trial has not begun, in order.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self.waiting: list[Candidate] = []
        self._first: dict[tuple[str, int], str] = {}
        self._repeated: set[str] = set()

    def takes(self, candidate: Candidate, result: TrialResult, spend: Callable[[], bool]) -> bool:
        """Returns whether a candidate runs once more, so that the search does not learn of its result.

        Args:
            candidate: the candidate of a trial of the search.
            result: how the trial ended.
            spend: takes one trial of the budget, and returns False if none is left.
        """
        key, cause = _key(candidate), cause_of(without_log(result.reason))
        before = self._first.pop(key, None)
        # A lack of memory or of data follows from the size, and a second deadline costs more than it tells. A search
        # itself asks again for a candidate that was killed from outside.
        if result.outcome is not Outcome.CRASHED or result.from_outside:
            return False
        if before is not None:
            self._repeated |= {cause} if cause == before else set()
            return False
        if cause in self._repeated or not spend():
            return False
        self._first[key] = cause
        self.waiting.append(candidate)
        return True

    def begins(self, candidate: Candidate) -> bool:
        """Takes the start of a trial. Returns whether it is a second try, for which the search has not asked."""
        if candidate not in self.waiting:
            return False
        self.waiting.remove(candidate)
        return True


def not_tried_again(events: Sequence[Event]) -> set[int]:
    """Returns the numbers of the crashed trials whose candidate was not tried again before the search went on.

    Such a history is of an older version, whose search has learned of the crash at once.
    """
    asks = [event for event in events if isinstance(event, Asked | AskedSweep)]
    keys = {number: _key(candidate) for event in asks for number, candidate in event.decided.numbered}
    found: set[int] = set()
    later: set[tuple[str, int]] = set()
    for event in reversed(events):
        if isinstance(event, AskedSweep) or (isinstance(event, Asked) and event.purpose is Purpose.SEARCH):
            later |= {keys[number] for number, _ in event.decided.numbered}
        elif isinstance(event, Told) and event.result.outcome is Outcome.CRASHED and later:
            found |= {event.number} if keys[event.number] not in later else set()
    return found


def _key(candidate: Candidate) -> tuple[str, int]:
    return candidate.lineage, candidate.micro_batch_size
