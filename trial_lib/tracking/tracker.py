"""Sends a folder to MLflow while it grows, from a thread of its own: nothing that MLflow does holds anything up."""

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from trial_lib.records.full_experiment_folder import FullExperimentPaths
from trial_lib.records.study_folder import StudyPaths
from trial_lib.tracking import tracking_uri as uris
from trial_lib.tracking.full_experiment_sync import FullExperimentSync
from trial_lib.tracking.sync import StudySync

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Sync(Protocol):
    """Sends a folder, again and again as it grows."""

    @property
    def page(self) -> str | None:
        """The path of the page that shows what the folder holds; None before MLflow has it."""

    @property
    def run_page(self) -> str | None:
        """The path of the page of the folder's own run; None before MLflow has it."""

    def run(self) -> None:
        """Sends what is new; after an error, a new one has to be taken."""


class Tracker:
    """Keeps MLflow up to date with a folder.

    Args:
        new_sync: returns what sends the folder.
        tracking_uri: MLflow's store or server.

    Attributes:
        tracking_uri: as it may be shown, without a password.
        last_error: why the last attempt failed, or came too late; None after one that did not.
    """

    def __init__(self, new_sync: Callable[[], Sync], tracking_uri: str) -> None:
        self.tracking_uri = uris.without_password(tracking_uri)
        self.last_error: str | None = None
        self._uri = tracking_uri
        self._new_sync = new_sync
        self._sync = new_sync()
        self._changed = threading.Condition()
        self._noted = 0  # notifications so far
        self._arrived = 0  # those among them whose news MLflow has
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracker")

    def start(self) -> None:
        """Starts the thread, which sends what is there already."""
        self.notify()
        self._thread.start()

    def notify(self) -> None:
        """Says that there is something new in the folder. Returns at once."""
        with self._changed:
            self._noted += 1
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Sends the rest, and waits for it no longer than the timeout.

        Returns:
            Whether MLflow has everything; what it has not can be sent any time later, by a sync of the folder.
        """
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        arrived = self._arrived == self._noted
        if not arrived and self.last_error is None:
            self.last_error = f"it takes longer than {timeout_s:.0f} s"
        return arrived

    @property
    def ways(self) -> tuple[str, ...]:
        """How a person gets to what MLflow shows of the folder: what to type, if anything, and the page's address."""
        return uris.ways_to(self._uri, self._sync.page)

    @property
    def run_ways(self) -> tuple[str, ...]:
        """The same for the page of the folder's own run, which opens with its description."""
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
