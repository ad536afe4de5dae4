"""A study of `estimate` or of a recorded table that fails: what it says, and what it leaves to be read."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from study_fixtures import TINY

from benchmarks.replay import record as recording
from zerotune.flows.interrupts import interrupts
from zerotune.flows.planning import estimate_command
from zerotune.trial_lib.launch.rank_starter import LaunchRequest
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter
from zerotune.trial_lib.launch.trial import unstarted
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import Work


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model, its experiment and nothing else; temporary folders stand in it as well."""
    shutil.copytree(TINY, tmp_path / "model")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    # Looking for DeepSpeed's ops takes seconds, and no rank is started.
    monkeypatch.setattr(ColdStarter, "_build", lambda starter: None)
    # The ranks of the profile trial start cold.
    monkeypatch.setattr(WarmStarter, "start", lambda starter: None)
    monkeypatch.setattr(WarmStarter, "launch", lambda starter, request: starter._cold.launch(request))
    return tmp_path


def estimate(work: Path) -> int:
    arguments = StudyArguments(config_path=work / "model" / "deepspeed.yaml", model_dir=work / "model")
    return estimate_command(arguments, as_json=False)


def record(work: Path) -> int:
    arguments = StudyArguments(config_path=work / "model" / "deepspeed.yaml", model_dir=work / "model", start="cold")
    return recording.record(arguments, [1], 1, work / "table.jsonl")


COMMANDS = pytest.mark.parametrize("command", [estimate, record])


def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the profile trial fail, with a log."""

    def run(driver: StudyDriver, work: Work) -> list[TrialResult]:
        (plan,) = work.plans
        plan.paths.root.mkdir(parents=True)
        plan.paths.log(0).write_text("ValueError: a bug\n")
        return [unstarted(plan, Outcome.CRASHED, f"ValueError: a bug Log: {plan.paths.log(0)}")]

    monkeypatch.setattr(StudyDriver, "run", run)


@COMMANDS
def test_the_log_that_a_failure_names_is_there_when_the_message_is_read(
    command: Callable[[Path], int], work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(monkeypatch)
    assert command(work) == 1
    said = capsys.readouterr().err
    named = re.search(r"Log: (\S+)", said)
    assert named is not None, said
    assert Path(named[1]).read_text() == "ValueError: a bug\n"
    assert work in Path(named[1]).parents
    assert interrupts.leavings == []


@COMMANDS
def test_a_trial_that_cannot_be_started_is_not_said_to_have_been_killed_or_to_be_resumed(
    command: Callable[[Path], int], work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(starter: ColdStarter, request: LaunchRequest) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(ColdStarter, "launch", refuse)
    assert command(work) == 1
    said = capsys.readouterr().err.splitlines()
    assert os.strerror(errno.EAGAIN) in said[-1]
    assert "could not be run" in said[-1]
    assert "killed" not in said[-1]
    assert "resume" not in said[-1]


def test_an_estimate_that_was_cut_short_leaves_nothing(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StudyDriver, "run", lambda driver, work: [unstarted(work.plans[0], Outcome.CANCELLED, "cancelled")]
    )
    with pytest.raises(KeyboardInterrupt):
        estimate(work)
    assert list((work / "tmp").iterdir()) == []
    assert not (work / "zerotune-studies").exists()
