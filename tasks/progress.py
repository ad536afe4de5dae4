"""The progress bar and the leaderboard of a running study in Prefect."""

import time
from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact

from tasks.telling import told_if_possible
from trial_lib.report.leaderboard import leaderboard
from trial_lib.study.driver import StudyDriver

_ROWS = 100
_SHARE = 0.05  # of the search's time at most is spent on updates


class Progress:
    """The two artifacts of a running study. Their updates take `_SHARE` of the search's time at most."""

    def __init__(self, driver: StudyDriver) -> None:
        self._driver = driver
        self._bar: UUID | None = None
        self._next = 0.0

    @property
    def _percent(self) -> float:
        return 100.0 * self._driver.state.searched / self._driver.setup.arguments.max_trials

    def update(self) -> None:
        """Updates both, unless that has just been done."""
        if time.monotonic() >= self._next:
            self._tell()

    def finish(self) -> None:
        """Shows the state at the end of the search."""
        self._tell()

    def _tell(self) -> None:
        driver, began = self._driver, time.monotonic()
        rows = leaderboard(driver.state.results, driver.state.candidates, driver.metric)
        more = f"; the best {_ROWS} of {len(rows)}" if len(rows) > _ROWS else ""
        with told_if_possible(driver.log):
            create_table_artifact(
                [row.for_people() for row in rows[:_ROWS]],
                key="leaderboard",
                description=f"Best first, by {driver.metric}{more}",
            )
            if self._bar is None:
                most = driver.setup.arguments.max_trials
                self._bar = create_progress_artifact(
                    self._percent, key="progress", description=f"{most} trials at most"
                )
            else:
                update_progress_artifact(self._bar, self._percent)
        ended = time.monotonic()
        self._next = ended + (ended - began) / _SHARE
