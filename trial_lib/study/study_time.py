"""The time that a study may take (`--max-minutes`)."""

import time

MINUTES_OVER = "its minutes are over"
"""The end of a search that has used up its time, as the history has it."""

# A confirmation takes about half the time of the search before it.
_OF_SEARCH = 2 / 3


class StudyTime:
    """Counts the time of a study, from its opening in this process on.

    Args:
        minutes: the limit; None for no limit.
        seconds_before: the running time of the trials that the study had when it was opened again.
        confirms: whether the search's winner is confirmed. The last third of the time is left for that.
    """

    def __init__(self, minutes: float | None, seconds_before: float, confirms: bool = True) -> None:
        self._minutes = minutes
        self._seconds_before = seconds_before
        self._share = _OF_SEARCH if confirms else 1.0
        self._opened = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the study may run no longer."""
        return self._has_taken(1.0)

    @property
    def is_over_for_search(self) -> bool:
        """Whether the search may start no further trial."""
        return self._has_taken(self._share)

    @property
    def told(self) -> str:
        """Why a trial is ended when it is over, as a sentence."""
        return f"The {self._minutes:g} minutes of --max-minutes were over while it ran."

    def check(self) -> None:
        """Raises TimeoutError if the study may run no longer."""
        if self.is_over:
            raise TimeoutError(self.told)

    def _has_taken(self, share: float) -> bool:
        if self._minutes is None:
            return False
        return time.monotonic() - self._opened + self._seconds_before >= share * 60 * self._minutes
