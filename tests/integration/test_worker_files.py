"""What the workers of a program's data loader keep in the temporary folder is gone when the trial is."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Trials

from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = pytest.mark.alone

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
ENDLESS = StepWindow(start_step=2, end_step=10**6, max_steps=10**6, max_seconds=10**6)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder that nothing else writes to, with a short name: sockets have to fit."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
@pytest.mark.parametrize("ended_by", ["itself", pytest.param("the deadline", marks=pytest.mark.long)])
def test_a_trial_with_data_loader_workers_leaves_no_temporary_file(
    trials: Trials, temporary: Path, starter: str, ended_by: str
) -> None:
    environment = {**rank_environment(), "TMPDIR": str(temporary)}
    window, deadline_s = (SHORT, 60.0) if ended_by == "itself" else (ENDLESS, 12.0)
    plan = trials.plan(
        *("varied_lengths.py", "--workers", "2", "--steps", "1000000", "--count", "10000000"),
        environment=environment,
        window=window,
        deadline_s=deadline_s,
    )
    ended, seen = threading.Event(), set[str]()

    def look() -> None:
        while not ended.wait(0.02):
            seen.update(path.name for path in temporary.rglob("listener-*"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        result = trials.start(plan, starter).result()
    finally:
        ended.set()
        looking.join()
    assert result.outcome == ("completed" if ended_by == "itself" else "timed_out"), result.reason
    assert seen, "its workers had no sockets: nothing was tested"
    # The watchdog removes the place of the records when the guard has ended.
    trials.wait_until(lambda: not list(temporary.iterdir()), 5, "an empty folder")
