"""Sends a folder to MLflow while it grows, in a thread of its own, so that MLflow holds nothing up."""

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trial_lib.records.folders import FullExperimentPaths, StudyPaths
from trial_lib.tracking import tracking_uri as uris
from trial_lib.tracking.sync import FullExperimentSync, StudySync

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNTOLD_S = 3.0


class Sync(Protocol):
    """Sends a folder, repeatedly as it grows."""

    @property
    def page(self) -> str | None:
        """The path of the page that shows the folder's content; None before MLflow has it."""

    @property
    def run_page(self) -> str | None:
        """The path of the page of the folder's own run; None before MLflow has it."""

    def run(self) -> None:
        """Sends new content. After an error, make a new one."""


class Tracker:
    """Keeps MLflow up to date with a folder."""

    def __init__(self, new_sync: Callable[[], Sync], tracking_uri: str) -> None:
        self.tracking_uri = uris.without_password(tracking_uri)  # to be shown
        self.last_error: str | None = None  # why the last attempt failed or came too late; None after a success
        self._uri = tracking_uri
        self._new_sync = new_sync
        self._sync = new_sync()
        self._changed = threading.Condition()
        self._noted = 0  # notifications so far
        self._arrived = 0  # notifications whose content MLflow has
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracker")

    def start(self) -> None:
        self.notify()
        self._thread.start()

    def notify(self) -> None:
        """Tells the thread that the folder has new content. Returns at once."""
        with self._changed:
            self._noted += 1
            self._changed.notify()

    def close(self, timeout_s: float, tell: Callable[[str], None] = lambda sentence: None) -> bool:
        """Sends the rest, and waits at most for the timeout. Returns whether MLflow has everything.

        `tell` gets a sentence if it takes a while. The rest can be sent later, by a sync of the folder.
        """
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(min(_UNTOLD_S, timeout_s))
        if self._thread.is_alive():
            tell(f"Waiting for MLflow, for {timeout_s:.0f} s at most.")
            self._thread.join(max(0.0, timeout_s - _UNTOLD_S))
        arrived = self._arrived == self._noted
        if not arrived and self.last_error is None:
            self.last_error = f"it takes longer than {timeout_s:.0f} s"
        return arrived

    @property
    def ways(self) -> tuple[str, ...]:
        """The way to the folder's page in MLflow: the command to type, if any, and the page's address."""
        return uris.ways_to(self._uri, self._sync.page)

    @property
    def run_ways(self) -> tuple[str, ...]:
        """The same for the page of the folder's own run, which begins with its description."""
        return uris.ways_to(self._uri, self._sync.run_page)

    @property
    def _closing(self) -> bool:
        return self._deadline < math.inf

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while time.monotonic() < self._deadline:
            with self._changed:
                self._changed.wait_for(lambda: self._noted > self._arrived or self._closing)
                noted = self._noted
            if noted == self._arrived:
                return
            if self._send():
                self._arrived = noted
                pause_s = _FIRST_PAUSE_S
            elif self._closing:
                time.sleep(_FIRST_PAUSE_S)
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _send(self) -> bool:
        try:
            self._sync.run()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with MLflow, the work continues
            self.last_error = str(error).replace(self._uri, self.tracking_uri)
            self._sync = self._new_sync()
            return False
        self.last_error = None
        return True


class StudyTracker(Tracker):
    """Keeps MLflow up to date with a study's folder."""

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        super().__init__(lambda: StudySync(paths, tracking_uri), tracking_uri)


class FullExperimentTracker(Tracker):
    """Keeps MLflow up to date with a full experiment's folder."""

    def __init__(self, paths: FullExperimentPaths, tracking_uri: str) -> None:
        super().__init__(lambda: FullExperimentSync(paths, tracking_uri), tracking_uri)
