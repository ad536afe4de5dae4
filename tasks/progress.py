"""What Prefect shows while a study runs: a progress bar and a growing leaderboard."""

from uuid import UUID

from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact

from tasks.telling import told_if_possible
from trial_lib.report.leaderboard import leaderboard
from trial_lib.study.driver import StudyDriver


class Progress:
    """The two artifacts of a running study."""

    def __init__(self, driver: StudyDriver) -> None:
        self._driver = driver
        self._bar: UUID | None = None
        with told_if_possible(driver.log):
            self._bar = create_progress_artifact(
                self._percent, key="progress", description=f"{driver.arguments.max_trials} trials at most"
            )

    @property
    def _percent(self) -> float:
        return 100.0 * self._driver.searched / self._driver.arguments.max_trials

    def update(self) -> None:
        """Brings both to what the study knows."""
        driver = self._driver
        rows = leaderboard(driver.results, driver.candidates, driver.arguments.metric)
        with told_if_possible(driver.log):
            if self._bar is not None:
                update_progress_artifact(self._bar, self._percent)
            create_table_artifact(
                [row.for_people() for row in rows],
                key="leaderboard",
                description=f"Best first, by {driver.arguments.metric}",
            )
