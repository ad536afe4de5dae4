"""The time that a search may take (`--max-minutes`)."""

import time

MINUTES_OVER = "its minutes are over"
"""The end of a search that has used up its time, as the history has it."""


class SearchTime:
    """Counts the time of a study, from its opening in this process on.

    Args:
        minutes: the limit; None for no limit.
        seconds_before: the running time of the trials that the study had when it was opened again.
    """

    def __init__(self, minutes: float | None, seconds_before: float) -> None:
        self._minutes = minutes
        self._seconds_before = seconds_before
        self._opened = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the search may start no further trial."""
        if self._minutes is None:
            return False
        return time.monotonic() - self._opened + self._seconds_before >= 60 * self._minutes
