"""What people are shown of a trial that failed: its program's own words, wherever its ranks have left them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyPaths, TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.report.read_study import LogEnds, first_failed


def failed(number: int, ran: TrialPaths, purpose: Purpose = Purpose.SEARCH) -> TrialResult:
    """Returns the result of a trial whose second rank has raised an exception, with what that leaves."""
    ran.root.mkdir(parents=True, exist_ok=True)
    logs = [ran.log(0), ran.log(1)]
    for path in logs:
        path.write_text("its last words\n")
    failure = {"type": "KeyError", "message": "'lr'", "traceback": "Traceback: KeyError: 'lr'", "ended_early": False}
    ran.failure(1).write_text(json.dumps(failure))
    return TrialResult(
        trial_id="a",
        number=number,
        purpose=purpose,
        config_hash="a",
        outcome=Outcome.CRASHED,
        reason=f"The program raised KeyError: 'lr' Log: {logs[1]}",
        failed_rank=1,
        host="here",
        started_at=0.0,
        logs=[str(path) for path in logs],
    )


@pytest.fixture
def paths(tmp_path: Path) -> StudyPaths:
    return StudyPaths(tmp_path / "study")


def test_a_program_that_fails_as_typed_shows_its_traceback(paths: StudyPaths) -> None:
    typed = paths.trial(0).as_typed
    result = failed(0, typed, Purpose.PROFILE)
    record = first_failed(result, paths)
    assert record.log == str(typed.log(1))
    assert record.failure is not None
    shown, name = LogEnds(paths, KnownSecrets(())).of(result)
    assert (shown, name) == ("Traceback: KeyError: 'lr'", str(typed.log(1).relative_to(paths.root)))


def test_any_other_trial_s_records_are_in_its_own_folder(paths: StudyPaths) -> None:
    result = failed(3, paths.trial(3))
    assert first_failed(result, paths).log == str(paths.trial(3).log(1))
    assert LogEnds(paths, KnownSecrets(())).of(result)[0] == "Traceback: KeyError: 'lr'"


@pytest.mark.parametrize("as_typed", [True, False])
def test_they_are_found_where_the_study_is_now(paths: StudyPaths, tmp_path: Path, as_typed: bool) -> None:
    trial = paths.trial(0)
    result = failed(0, trial.as_typed if as_typed else trial)
    shutil.move(paths.root, tmp_path / "moved")
    moved = StudyPaths(tmp_path / "moved")
    record = first_failed(result, moved)
    assert Path(record.log).is_relative_to(moved.root)
    assert record.log_tail == "its last words\n"
    assert record.failure is not None


def test_a_trial_that_is_another_one_again_shows_what_that_has_left(paths: StudyPaths) -> None:
    result = replace(failed(3, paths.trial(3)), number=7)
    assert LogEnds(paths, KnownSecrets(())).of(result)[0] == "Traceback: KeyError: 'lr'"


@pytest.mark.parametrize("as_link", [True, False])
def test_a_folder_that_somebody_has_sent_shows_no_file_outside_itself(
    paths: StudyPaths, tmp_path: Path, as_link: bool
) -> None:
    result = replace(failed(3, paths.trial(3)), failed_rank=0)
    key, log = tmp_path / "id_rsa", paths.trial(3).log(0)
    key.write_text("private")
    log.unlink()
    if as_link:
        log.symlink_to(key)
    else:
        result = replace(result, logs=[str(paths.root / ".." / "id_rsa")])
    assert "private" not in LogEnds(paths, KnownSecrets(())).of(result)[0]
