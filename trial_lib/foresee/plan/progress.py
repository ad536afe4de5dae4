"""How far a plan is: sentences every few seconds, the seconds of its parts, and no collector in its way."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence

from trial_lib.foresee.plan.arm_work import WantedRun
from trial_lib.wire.foreseen_run import ForeseenRun

_WORD_S = 4.0


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps Python's collector of cycles from looking at the millions of records of a plan's runs again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PlanProgress:
    """Says how far the runs are, and that they go on.

    Args:
        tell: called with a sentence.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._total = self._done = 0
        self._begun_at = self._said_at = time.monotonic()

    def begin(self, total: int) -> None:
        """Begins a number of runs."""
        self._total, self._done = total, 0
        self._said_at = time.monotonic()

    def one(self, run: WantedRun, found: ForeseenRun) -> None:
        """Says that a run has ended."""
        self._done += 1
        of = f" ({self._done} of {self._total})" if self._total > 1 else ""
        if found.stopped and (run.is_first or run.is_ahead):
            # The plan ends with the sentence of the first run. Without one the run ahead is repeated.
            return
        if found.stopped:
            self._say(f"{run.name} cannot be foreseen{of}: {found.stopped}")
        else:
            self._say(f"foreseen: {run.name}, {found.seconds:.1f} s{of}")

    def still(self, names: Sequence[str]) -> None:
        """Says from time to time which runs are under way."""
        now = time.monotonic()
        if names and now - self._said_at > _WORD_S:
            self._say(f"still foreseeing {', '.join(names)} ({now - self._begun_at:.0f} s since the beginning)")

    def while_working(self, what: str, check: Callable[[], None]) -> Callable[[], None]:
        """Says what begins, and returns a `check` that also says from time to time that it goes on."""
        self._say(what)

        def checked() -> None:
            check()
            now = time.monotonic()
            if now - self._said_at > _WORD_S:
                self._say(f"still {what} ({now - self._begun_at:.0f} s since the beginning)")

        return checked

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._tell(text)


class PlanWatch:
    """Measures the parts of a planning.

    Attributes:
        shares: seconds of each part so far.
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.monotonic()
        self.shares[name], self._at = now - self._at, now
