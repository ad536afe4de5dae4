"""When a trial's failure is the disk's, and the study stops in its place."""

import errno
import threading
from pathlib import Path

import pytest
from simulated_studies import Experiment

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.trial import Note, ThisHost, TrialPlan, unstarted, write_unstarted
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study import folder
from zerotune.trial_lib.study.folder import (
    FolderError,
    check_end,
    check_folder,
    check_room,
    folder_error_told,
    number_of,
)
from zerotune.trial_lib.study.history import unrecorded_ends
from zerotune.trial_lib.study.runner import Runner, Work


def result(outcome: Outcome, reason: str = "") -> TrialResult:
    return TrialResult(trial_id="1", number=1, purpose=Purpose.SEARCH, config_hash="", outcome=outcome, reason=reason)


class Usage:
    """A disk with so much room."""

    def __init__(self, free: int) -> None:
        self.free = free


def give_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: Usage(free))


def test_a_disk_with_little_room_is_full_and_the_message_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_room(monkeypatch, 2**30)
    check_room(tmp_path)
    give_room(monkeypatch, 2**20)
    with pytest.raises(FolderError, match=f"1.0 MiB are free.*zerotune resume {tmp_path}"):
        check_room(tmp_path)


def test_a_trial_that_crashed_on_a_full_disk_is_not_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_room(monkeypatch, 2**20)
    with pytest.raises(FolderError):
        check_end(tmp_path, result(Outcome.CRASHED, "its rank ended with 1"))
    check_end(tmp_path, result(Outcome.COMPLETED))
    give_room(monkeypatch, 2**30)
    check_end(tmp_path, result(Outcome.CRASHED, "its rank ended with 1"))


def test_a_trial_that_filled_the_disk_itself_and_left_room_again_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_room(monkeypatch, 2**30)
    check_end(tmp_path, result(Outcome.CRASHED, "OSError: [Errno 28] No space left on device"))


def test_errors_of_a_full_disk_are_told_as_such_and_others_are_not(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(FolderError), folder_error_told(tmp_path):
            raise OSError(number, "full")
    with pytest.raises(PermissionError), folder_error_told(tmp_path):
        raise PermissionError(errno.EACCES, "not yours")


def test_a_trial_that_crashed_on_a_full_disk_is_not_found_by_the_resumed_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullHost(ThisHost):
        """One whose disk is full when the trial ends, with just enough room left for its record."""

        def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
            crashed = unstarted(plan, Outcome.CRASHED, "its rank ended with 1")
            write_unstarted(plan, crashed)
            give_room(monkeypatch, 2**20)
            return crashed

    with Experiment(tmp_path).opened() as study:
        driver, plan = study.driver, study.driver.profile_plan()
        place = FullHost(None, this_host(), tmp_path)  # type: ignore[arg-type]
        runner = Runner(place, driver.log, lambda _: None, lambda _: None, lambda plan, run: run(plan))
        with pytest.raises(FolderError):
            runner.run(Work((plan,)))
        assert plan.paths.candidate.exists()
        assert list(unrecorded_ends(study.paths, [plan.number])) == []


def test_an_error_of_our_own_on_a_full_disk_is_heard_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenHost(ThisHost):
        def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
            give_room(monkeypatch, 2**20)
            raise RuntimeError("the guard did not answer")

    with Experiment(tmp_path).opened() as study:
        driver = study.driver
        place = BrokenHost(None, this_host(), tmp_path)  # type: ignore[arg-type]
        runner = Runner(place, driver.log, lambda _: None, lambda _: None, lambda plan, run: run(plan))
        with pytest.raises(FolderError):
            runner.run(Work((driver.profile_plan(),)))
        with pytest.raises(FolderError):
            runner.next_ended(timeout_s=1)


@pytest.mark.parametrize("then", ["moved", "removed", "replaced"])
def test_a_folder_that_is_lost_is_told_with_what_to_do(then: str, tmp_path: Path) -> None:
    root = tmp_path / "study"
    root.mkdir()
    number = number_of(root)
    check_folder(root, number)
    if then == "removed":
        root.rmdir()
    else:
        root.rename(tmp_path / "elsewhere")
    if then == "replaced":
        root.mkdir()
    with pytest.raises(FolderError, match=r"moved or removed while the study ran.*zerotune resume") as raised:
        check_folder(root, number)
    assert str(root) in str(raised.value)
    if then != "replaced":
        with pytest.raises(FolderError, match="moved or removed"), folder_error_told(root):
            (root / "file").write_text("")
        with pytest.raises(FolderError, match="moved or removed"):
            check_end(root, result(Outcome.CRASHED, "its rank ended with 1"))


def test_a_folder_that_became_read_only_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write whatever the permissions say, but not to a disk that is read-only.
    monkeypatch.setattr(folder.os, "access", lambda *_: False)
    with pytest.raises(FolderError, match=f"can no longer be written.*zerotune resume {tmp_path}"):
        check_room(tmp_path)
