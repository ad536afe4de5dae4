"""When a full experiment is started again, when it is not, and how one that has failed is resumed."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from full_experiment_fixtures import Folder, run_to_its_end
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.launch import full_training
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyStatus
from zerotune.trial_lib.study import full_experiment, program
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment, resume_newest


@pytest.mark.long
def test_a_crash_that_repeats_itself_is_not_repeated_to_the_end(folder: Folder) -> None:
    arguments = folder.write_script("--no_such_option", max_restarts=5)
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    assert end.reason.startswith("The program ended by itself with SystemExit: 2; ")
    assert "Attempts 1 and 2 of 6 ended so, with no progress between them: another would, too." in end.reason
    assert (folder.record["status"], folder.record["attempts"]) == ("failed", 2)
    assert "(it starts again in 1 s)" in folder.paths.log.read_text()


@pytest.mark.long
def test_the_same_crash_further_on_is_started_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TRIAL_CLASS_MODULE", "stand_in")
    monkeypatch.setattr(full_training, "_FIRST_PAUSE_S", 0.1)
    arguments = folder.write_class(batches=6, max_restarts=5, hparams={"fails_after": 2})
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    assert folder.record["attempts"] == 3
    assert folder.paths.log.read_text().count("The program raised RuntimeError: the disk is away") == 2


@pytest.mark.long
def test_a_script_that_somebody_kills_again_and_again_is_started_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_training, "_FIRST_PAUSE_S", 0.1)
    arguments = folder.write_script("--steps", "30", "--step_seconds", "0.05", max_restarts=2)
    running = new_full_experiment(arguments, folder.root)
    killed: set[int] = set()
    running.begin()
    try:
        while (end := running.wait(0.02)) is None:
            pids = set(folder.pids()) - killed
            if pids and len(killed) < 2:
                killed |= pids
                os.kill(pids.pop(), signal.SIGKILL)
    finally:
        running.close()
    assert end.completed, end.reason
    assert folder.record["attempts"] == 3


def test_the_pause_before_a_restart_ends_with_the_command(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_training, "_FIRST_PAUSE_S", 30.0)
    running = new_full_experiment(folder.write_script("--crashes", "1", max_restarts=1), folder.root)
    running.begin()
    while "it starts again in 30 s" not in folder.paths.log.read_text():
        assert running.wait(0.02) is None
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 5
    running.finish(StudyStatus.CANCELLED, "interrupted")
    running.close()
    assert (folder.record["status"], folder.record["attempts"]) == ("cancelled", 1)


def test_a_folder_stays_locked_until_the_training_s_processes_are_gone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def held(starter: ColdStarter) -> None:
        is_held.set()
        may_end.wait(30)

    monkeypatch.setattr(ColdStarter, "_build", held)
    monkeypatch.setattr(full_experiment, "_CANCEL_S", 0.2)
    arguments = folder.write_script()
    running = new_full_experiment(arguments, folder.root)
    running.begin()
    assert is_held.wait(10)
    running.stop()
    running.finish(StudyStatus.CANCELLED, "interrupted")
    running.close()
    assert "processes of the training still run" in folder.paths.log.read_text()
    with pytest.raises(InputError, match="another process drives this full experiment"):
        resume_newest(arguments, folder.root)
    may_end.set()
    running._thread.join(10)
    assert run_to_its_end(resume_newest(arguments, folder.root)).completed


def test_what_holds_hyperparameters_is_for_the_user_alone(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TRIAL_CLASS_MODULE", "stand_in")
    arguments = folder.write_class(batches=2, hparams={"api_key": "a_secret"})
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
    for file in folder.paths.root.rglob("*"):
        if file.is_file() and "a_secret" in file.read_text():
            assert file.stat().st_mode & 0o077 == 0, file
    assert folder.record["hparams"]["api_key"] == "a_secret"
    (run,) = folder.runs
    assert run.data.params["hyperparameters.api_key"] == "<redacted>"


@pytest.mark.long
def test_a_study_s_full_experiment_that_failed_is_resumed(tmp_path: Path, home: Path, server: PrefectServer) -> None:
    zerotune = Zerotune(tmp_path, home, program="--num_steps 300")
    script = zerotune.model / "train.py"
    unmended = script.read_text()
    script.write_text(f"{unmended}\nraise RuntimeError('the disk is away')\n")
    arguments = ("binary", "-mt", "2", "-z", "1", "-m", "throughput", "--run-full-experiment")
    ended = zerotune.run(*arguments, PREFECT_API_URL=server.api_url)
    study, paths = zerotune.study, zerotune.study.paths
    assert ended.returncode == 3, ended.stderr
    assert "The full experiment failed. The program raised RuntimeError: the disk is away" in ended.stderr
    assert f"Fix that, then resume with: zerotune resume {paths.root}" in ended.stderr
    assert study.record["status"] == "completed"
    history, answer = paths.history.read_text(), paths.best_ds_config.read_text()

    script.write_text(unmended)
    ended = zerotune.run("resume", paths.root, "--json", PREFECT_API_URL=server.api_url)
    assert ended.returncode == 0, ended.stderr
    trained = json.loads(ended.stdout)["full_experiment"]
    assert (trained["status"], trained["attempts"]) == ("completed", 2)
    assert study.record["status"] == "completed"
    assert (paths.history.read_text(), paths.best_ds_config.read_text()) == (history, answer)

    ended = zerotune.run("resume", paths.root)
    assert ended.returncode == 2
    assert "this study has finished." in ended.stderr
