"""Full experiments that are killed: nothing of them stays, and what is lost is since the last checkpoint."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from full_experiment_fixtures import Folder, run_to_its_end
from study_fixtures import Running, is_alive

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.messages.files import MetricsReader
from zerotune.trial_lib.study import program
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment, resume_newest

pytestmark = pytest.mark.alone


def start(folder: Folder, home: Path, server: PrefectServer, *options: str) -> Running:
    command = folder.command(home)
    return command.start(*command.arguments, *options, PREFECT_API_URL=server.api_url)


def latest(folder: Folder, kind: str) -> int:
    """Returns the last batch that the training has told of."""
    return max(folder.told(kind), default=0) if (folder.root / "zerotune-experiments").exists() else 0


def newest_checkpoint(folder: Folder) -> int:
    """Returns the batch of the newest checkpoint: one that the training did not live to tell of counts as well."""
    return max(int(path.name.removeprefix("batch-")) for path in folder.paths.checkpoints.glob("batch-*"))


@pytest.mark.long
def test_sigkill_and_ctrl_c_leave_no_process_and_resume_starts_from_the_last_checkpoint(
    folder: Folder, home: Path, server: PrefectServer
) -> None:
    folder.write_class(batches=5000, period=5, hparams={"step_seconds": 0.05})
    command = start(folder, home, server)
    command.wait_until(lambda: latest(folder, "checkpoint") >= 5, "the first checkpoint")
    command.wait_until(lambda: latest(folder, "training") % 5 == 2, "a batch between two checkpoints")
    command.process.kill()
    command.process.wait()
    assert command.left_over(2) == []
    assert folder.record["status"] == "running"
    killed_at, saved = latest(folder, "training"), newest_checkpoint(folder)

    command = start(folder, home, server, "--resume")
    command.wait_until(lambda: latest(folder, "training") > killed_at, "the training to continue")
    command.process.send_signal(signal.SIGINT)
    ended = command.end(timeout=20)
    assert ended.returncode == 130, ended.stderr
    assert f"Resume with: zerotune train {folder.config} {folder.model} --resume" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(2) == []
    assert folder.record["status"] == "cancelled"
    stopped_at, saved_again = latest(folder, "training"), newest_checkpoint(folder)

    arguments = folder.write_class(batches=stopped_at + 4, period=5)
    assert run_to_its_end(resume_newest(arguments, folder.root)).completed
    assert (folder.record["batches"], folder.record["attempts"]) == (stopped_at + 4, 3)
    assert [step for step, _ in folder.history("training.loss")] == list(range(1, stopped_at + 5))
    # What was trained again is what came after the last checkpoint.
    assert folder.told("training") == [
        *range(1, killed_at + 1),
        *range(saved + 1, stopped_at + 1),
        *range(saved_again + 1, stopped_at + 5),
    ]


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank", "guard"])
def test_a_killed_rank_or_guard_costs_the_work_since_the_last_checkpoint(
    folder: Folder, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "TRIAL_CLASS_MODULE", "stand_in")
    arguments = folder.write_class(batches=40, period=5, max_restarts=1, hparams={"step_seconds": 0.05})
    full_experiment = new_full_experiment(arguments, folder.root)
    full_experiment.begin()
    try:
        while latest(folder, "training") < 12:
            assert full_experiment.wait(0.02) is None
        (rank,) = folder.pids()
        os.kill(rank if victim == "rank" else psutil.Process(rank).ppid(), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (end := full_experiment.wait(0.05)) is None:
            assert time.monotonic() < deadline
    finally:
        full_experiment.close()
    assert end.completed, end.reason
    notes = [line.text for line in MetricsReader(folder.paths.metrics).read() if line.kind == "note"]
    assert notes == ["resuming from batch 0", "resuming from batch 10"]
    assert not any(psutil.pid_exists(pid) and is_alive(psutil.Process(pid)) for pid in folder.pids())
