"""A starter whose running processes can be ended without ending the starter."""

import threading
from typing import Protocol

from trial_lib.launch.rank_starter import Launched, LaunchRequest


class Launches(Protocol):
    """Starts the processes of a run."""

    def launch(self, request: LaunchRequest) -> Launched:
        """See `RankStarter.launch`."""


class EndableStarter:
    """Starts the processes of some runs, which end together.

    Args:
        starter: starts them.

    Attributes:
        has_ended: whether `end` was called.
    """

    def __init__(self, starter: Launches) -> None:
        self._starter = starter
        self._lock = threading.Lock()
        self._running: list[Launched] = []
        self.has_ended = False

    def launch(self, request: LaunchRequest) -> Launched:
        """See `RankStarter.launch`."""
        launched = self._starter.launch(request)
        with self._lock:
            self._running.append(launched)
            ended = self.has_ended
        if ended:
            launched.cancel()
        return launched

    def end(self) -> None:
        """Ends the processes that run, and those that still start. Any thread may call this."""
        with self._lock:
            was_ended, self.has_ended = self.has_ended, True
            running = [] if was_ended else list(self._running)
        for launched in running:
            launched.cancel()
