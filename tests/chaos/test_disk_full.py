"""A disk that becomes full during a study: a clear stop, and a resume once there is room."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_fixtures import CannotMountError, fill, small_disk
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]

SEARCH = ("binary", "-mt", "5", "-z", "1", "-mct", "1")
_SIZE_MIB = 128


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Iterator[Zerotune]:
    """The command, with a small disk of its own for its studies."""
    # A trial takes some two seconds: long enough for the disk to become full in the middle of it.
    command = Zerotune(tmp_path / "work", home, program="--largest_micro_batch 300 --num_steps 100 --step_seconds 0.2")
    try:
        with small_disk(command.folder / "zerotune-studies", _SIZE_MIB):
            yield command
    except CannotMountError as error:
        pytest.skip(f"this user may not mount a file system, as root may ({error}), and no other disk may be filled")


def trial_is_training(zerotune: Zerotune, number: int) -> bool:
    logs = list(zerotune.folder.glob(f"zerotune-studies/*/trials/{number:04d}/rank0.log"))
    return bool(logs) and "pid " in logs[0].read_text()


# Nothing left at all, in the middle of a trial; or less than a study keeps for its own records.
@pytest.mark.parametrize("leave_mib", [0, 16])
def test_a_full_disk_stops_the_study_with_a_word_and_is_resumed_once_there_is_room(
    zerotune: Zerotune, server: PrefectServer, leave_mib: int
) -> None:
    named = {"PREFECT_API_URL": server.api_url}
    command = zerotune.start(*SEARCH, **named)
    command.wait_until(lambda: trial_is_training(zerotune, 2), "trial 2", timeout_s=120)
    study = zerotune.study
    ballast = fill(study.paths.root, leave_mib)
    stopped = command.end(timeout=90)
    assert stopped.returncode == 1, stopped.stderr
    said = re.findall(r"The disk is full: \S+ \w+ are free.*resume with: zerotune resume \S+", stopped.stderr)
    assert said, stopped.stderr
    assert said[-1].endswith(str(study.paths.root))
    assert "Traceback" not in stopped.stderr
    assert command.left_over(2) == []
    told = {event.number for event in study.told}
    assert told >= {0, 1}
    assert all(event.result.outcome is not Outcome.CRASHED for event in study.told)

    still_full = zerotune.run("resume", study.paths.root, **named)
    assert still_full.returncode == 1, still_full.stderr
    assert "The disk is full" in still_full.stderr
    assert "Traceback" not in still_full.stderr

    ballast.unlink()
    times = study.result_times()
    resumed = zerotune.run("resume", study.paths.root, **named)
    assert resumed.returncode == 0, resumed.stderr
    assert study.record["status"] == "completed"
    after = study.result_times()
    assert {number: after[number] for number in told} == {number: times[number] for number in told}
    numbers = [event.number for event in study.told]
    assert len(numbers) == len(set(numbers))
    assert all(result.outcome is not Outcome.CRASHED for result in study.results.values())
