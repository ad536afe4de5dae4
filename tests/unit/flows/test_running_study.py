import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from zerotune.flows import tune
from zerotune.flows.flow_run import RunningStudy, told_if_ended
from zerotune.flows.tune import run_to_its_end, tune_open
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyStatus


def test_a_command_s_flow_can_be_sent_to_another_host_without_its_study() -> None:
    """Prefect does so with each task on Ray. A study has locks, threads and open files."""
    study: Any = SimpleNamespace(lock=threading.Lock())
    flow = cloudpickle.loads(cloudpickle.dumps(tune_open(RunningStudy(study))))
    assert flow.name == "tune"


@pytest.mark.parametrize("interrupted", [False, True])
def test_wrong_input_is_told_from_an_interrupt(interrupted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both end the flow by an error. After Ctrl-C the command's exit code is that of an interrupt."""

    def fail(study: Any) -> None:
        raise InputError("no size fits.", where="the batch policy", remedy="Free the batch.")

    monkeypatch.setattr(tune, "run_while_there_is_room", fail)
    monkeypatch.setattr(tune, "finish", lambda *arguments: None)
    monkeypatch.setattr(tune, "interrupts", SimpleNamespace(heard=interrupted))
    study: Any = SimpleNamespace(driver=SimpleNamespace(cancel=lambda: None), close=lambda: None)
    running = RunningStudy(study)
    if interrupted:
        assert run_to_its_end(running).is_cancelled()
    else:
        with pytest.raises(InputError):
            run_to_its_end(running)
    assert running.is_refused is not interrupted


def test_an_interrupt_after_the_end_says_how_it_ended_and_one_of_a_resumed_study_does_not() -> None:
    """A study that has failed fails again if it is resumed, so the user needs its reason."""
    record: Any = SimpleNamespace(status=StudyStatus.FAILED, ended_at=1.0)
    ended = told_if_ended("the study", lambda: record, "it with: zerotune show s")
    assert ended() == ""
    for status, ended_at, said in [
        (StudyStatus.RUNNING, None, ""),
        (StudyStatus.CANCELLED, 2.0, ""),
        (StudyStatus.FAILED, 2.0, "Interrupted after the study had failed. See it with: zerotune show s"),
        (StudyStatus.COMPLETED, 2.0, "Interrupted after the study had completed. See it with: zerotune show s"),
    ]:
        record = SimpleNamespace(status=status, ended_at=ended_at)
        assert ended() == said
