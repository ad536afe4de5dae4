"""A study whose folder is moved, removed or made read-only while it runs: it ends soon, with a sentence."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_fixtures import CannotMountError, small_disk
from study_fixtures import Running, Study, Zerotune

from zerotune.flows.prefect_server import PrefectServer

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]

SEARCH = ("binary", "-mt", "5", "-z", "1", "-mct", "1")
PROGRAM = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.2"


def moved(study: Study) -> None:
    study.paths.root.rename(study.paths.root.parents[1] / "elsewhere")


def removed(study: Study) -> None:
    shutil.rmtree(study.paths.root, ignore_errors=True)


def without_history(study: Study) -> None:
    study.paths.history.unlink()


def without_current_folder(study: Study) -> None:
    # It stays as another name, where the test finds what the command has said.
    work = study.paths.root.parents[1]
    work.rename(work.with_name("removed"))
    shutil.rmtree(work.with_name("removed") / "zerotune-studies", ignore_errors=True)
    work.mkdir()
    for file in [*work.with_name("removed").glob("*.out"), *work.with_name("removed").glob("*.err")]:
        (work / file.name).hardlink_to(file)
    shutil.rmtree(work.with_name("removed"), ignore_errors=True)


def during_trial(zerotune: Zerotune, number: int, **named: str) -> Running:
    """Returns a command whose ranks train for that trial."""

    def trains() -> bool:
        logs = list(zerotune.folder.glob(f"zerotune-studies/*/trials/{number:04d}/rank0.log"))
        return bool(logs) and "pid " in logs[0].read_text()

    command = zerotune.start(*SEARCH, **named)
    command.wait_until(trains, f"trial {number}", timeout_s=120)
    return command


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (moved, "was moved or removed while the study ran"),
        (removed, "was moved or removed while the study ran"),
        (without_history, "history.jsonl was removed or cut"),
        (without_current_folder, "was moved or removed while the study ran"),
    ],
)
def test_a_study_that_loses_its_folder_ends_soon_with_a_sentence(
    lose: Callable[[Study], None], said: str, tmp_path: Path, home: Path, server: PrefectServer
) -> None:
    zerotune = Zerotune(tmp_path / "work", home, program=PROGRAM)
    named = {"PREFECT_API_URL": server.api_url}
    command = during_trial(zerotune, 0, **named)
    study = zerotune.study
    lose(study)
    ended = command.end(timeout=40)
    assert ended.returncode == 1, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(2) == []


def test_a_study_that_was_moved_is_resumed_in_its_new_place(tmp_path: Path, home: Path, server: PrefectServer) -> None:
    zerotune = Zerotune(tmp_path / "work", home, program=PROGRAM)
    named = {"PREFECT_API_URL": server.api_url}
    command = during_trial(zerotune, 2, **named)
    study = zerotune.study
    moved(study)
    assert command.end(timeout=40).returncode == 1
    place = study.paths.root.parents[1] / "elsewhere"
    told = {event.number for event in Study(place).told}
    assert told >= {0, 1}
    resumed = zerotune.run("resume", place, **named)
    assert resumed.returncode == 0, resumed.stderr
    assert Study(place).record["status"] == "completed"


def test_a_study_whose_disk_becomes_read_only_ends_soon_and_is_resumed(
    tmp_path: Path, home: Path, server: PrefectServer
) -> None:
    zerotune = Zerotune(tmp_path / "work", home, program=PROGRAM)
    named = {"PREFECT_API_URL": server.api_url}
    disk = zerotune.folder / "zerotune-studies"
    try:
        with small_disk(disk, 128):
            command = during_trial(zerotune, 1, **named)
            # A file that is open for writing forbids it to the disk itself, and not to another view of it.
            subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
            ended = command.end(timeout=40)
            assert ended.returncode == 1, ended.stderr
            assert "can no longer be written" in ended.stderr
            assert "Traceback" not in ended.stderr
            assert command.left_over(2) == []
            subprocess.run(["umount", "--lazy", str(disk)], check=True)
            assert zerotune.run("resume", zerotune.study.paths.root, **named).returncode == 0
    except CannotMountError as error:
        pytest.skip(f"this user may not mount a file system, as root may ({error})")
