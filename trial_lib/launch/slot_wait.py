"""A wait for slots, as it is told: in the log, in the trial's folder while it lasts, and in the trial's result."""

import json
import time
from collections.abc import Callable, Sequence

from trial_lib.records.result import WaitedForSlots
from trial_lib.records.study_folder import TrialPaths
from trial_lib.records.units import duration
from trial_lib.slots.queue import QueueWait
from trial_lib.wire import moments
from trial_lib.wire.whole_files import write_whole

# A short wait is told once. Then the words become rare.
_FIRST_WORD_S, _RAREST_S = 30.0, 600.0
_MOST_HOLDERS = 3
_DAY_S = 86400.0


class SlotWait:
    """Tells of one wait for slots.

    Args:
        label: what waits, such as `trial 0003`.
        note: called with a sentence at the start, now and then, and at the end.
        folders: of the trials that wait. Each has the last sentence in a file while the wait lasts.
    """

    def __init__(self, label: str, note: Callable[[str], None], folders: Sequence[TrialPaths] = ()) -> None:
        self._label, self._note, self._folders = label, note, folders
        self._first: QueueWait | None = None
        self._since = moments.now()
        self._next_word = 0.0
        self._written = ""
        self.waited: WaitedForSlots | None = None

    def tell(self, wait: QueueWait) -> None:
        """Takes the present state of the wait. It is called every few seconds."""
        if self._first is None:
            self._first, self._since = wait, moments.now()
        waiting = sentence(wait)
        if waiting != self._written:
            for paths in self._folders:
                write_whole(paths.waiting, json.dumps({"waiting": waiting, "since": self._since}))
            self._written = waiting
        if time.monotonic() < self._next_word:
            return
        seconds = moments.seconds_since(self._since)
        so_far = f" It has waited {duration(seconds)}." if seconds >= 1 else ""
        self._note(f"{self._label} waits for {waiting}.{so_far}")
        self._next_word = time.monotonic() + min(max(_FIRST_WORD_S, seconds), _RAREST_S)

    def end(self, has_slots: bool) -> None:
        """Ends it, if it had to wait at all."""
        if self._first is None:
            return
        seconds = moments.seconds_since(self._since)
        holders = [f"{holder} since {_moment(since)}" for holder, since in self._first.holders]
        self.waited = WaitedForSlots(seconds=round(seconds, 3), place=self._first.place, holders=holders)
        for paths in self._folders:
            paths.waiting.unlink(missing_ok=True)
        if has_slots:
            self._note(f"{self._label} has its slots after a wait of {duration(seconds)}")


def sentence(wait: QueueWait) -> str:
    """Returns what it waits for: slots, place and holders."""
    slots = f"{wait.count} of {wait.of} slot{'' if wait.of == 1 else 's'}, place {wait.place} in the queue"
    shown = [f"{holder} since {_moment(since)}" for holder, since in wait.holders[:_MOST_HOLDERS]]
    more = len(wait.holders) - len(shown)
    return f"{slots}. Held by {', '.join(shown)}{f' and {more} more' if more else ''}" if shown else slots


def _moment(since: float) -> str:
    is_today = abs(time.time() - since) < _DAY_S
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", time.localtime(since))
