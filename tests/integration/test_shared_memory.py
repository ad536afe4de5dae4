"""Shared memory that a trial's program leaves behind is told of, and gone where it is certainly the trial's."""

import threading
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from conftest import Trials

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = pytest.mark.alone

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
ENDLESS = StepWindow(start_step=2, end_step=10**6, max_steps=10**6, max_seconds=10**6)
SHM = Path("/dev/shm")


@pytest.fixture
def name() -> Iterator[str]:
    name = f"zerotune-test-{uuid.uuid4().hex[:8]}"
    yield name
    for left in SHM.glob(f"{name}*"):
        left.unlink()


@pytest.mark.parametrize(
    ("starter", "ended_by"),
    [
        ("warm", "itself"),
        pytest.param("cold", "itself", marks=pytest.mark.long),
        pytest.param("warm", "the deadline", marks=pytest.mark.long),
    ],
)
def test_what_a_program_forgets_is_removed_and_told_of_and_what_others_have_stays(
    trials: Trials, name: str, starter: str, ended_by: str, request: pytest.FixtureRequest
) -> None:
    before = SharedMemory(f"{name}-before", create=True, size=1 << 16)
    window, deadline_s = (SHORT, 60.0) if ended_by == "itself" else (ENDLESS, 12.0)
    plan = trials.plan(
        "leaves_shared_memory.py", "--steps", "1000000", "--name", name, window=window, deadline_s=deadline_s
    )
    notes: list[str] = []
    try:
        starts = request.getfixturevalue(f"{starter}_starter")
        result = ThisHost(starts, this_host(), trials.lock_dir).run_trial(plan, threading.Event(), notes.append)
        assert result.outcome == ("completed" if ended_by == "itself" else "timed_out"), result.reason
        assert {path.name for path in SHM.glob(f"{name}*")} == {f"{name}-before"}
        (said,) = [note for note in notes if "shared memory" in note]
        assert said.startswith("trial 0000: the program left 3.0 MiB of shared memory in /dev/shm (")
        assert f"{name}-elsewhere" in said
    finally:
        before.close()
        before.unlink()
