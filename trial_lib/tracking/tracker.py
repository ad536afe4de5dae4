"""Sends a study to MLflow while it runs, from a thread of its own: nothing that MLflow does holds the study up."""

import math
import threading
import time

from trial_lib.experiment.study import StudyPaths
from trial_lib.tracking import tracking_uri as uris
from trial_lib.tracking.sync import StudySync

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class StudyTracker:
    """Keeps MLflow up to date with a study's folder.

    Attributes:
        tracking_uri: as it may be shown, without a password.
        last_error: why the last attempt failed; None after one that did not.
    """

    def __init__(self, paths: StudyPaths, tracking_uri: str) -> None:
        self.tracking_uri = uris.without_password(tracking_uri)
        self.last_error: str | None = None
        self._paths = paths
        self._uri = tracking_uri
        self._sync = StudySync(paths, tracking_uri)
        self._changed = threading.Condition()
        self._noted = 0  # notifications so far
        self._arrived = 0  # those among them whose news MLflow has
        self._deadline = math.inf
        self._thread = threading.Thread(target=self._run, daemon=True, name="study-tracker")

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
            Whether MLflow has everything; what it has not can be sent any time later, by `sync_study`.
        """
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return self._arrived == self._noted

    @property
    def run_url(self) -> str:
        """The parent run's page, or what names it; the tracking URI until there is one."""
        if self._sync.experiment_id is None or self._sync.run_id is None:
            return self.tracking_uri
        return uris.run_url(self._uri, self._sync.experiment_id, self._sync.run_id)

    @property
    def ui_command(self) -> str:
        """What to type, or to open, to see all runs."""
        return uris.ui_command(self._uri)

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
        except Exception as error:  # noqa: BLE001 - whatever goes wrong with MLflow, the study goes on
            self.last_error = str(error).replace(self._uri, self.tracking_uri)
            self._sync = StudySync(self._paths, self._uri)
            return False
        self.last_error = None
        return True
