"""Ranks that train on another kind of device than their slots are: nothing is measured, and it is said why."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import host_of_tests
from full_experiment_fixtures import Folder, run_to_its_end
from study_fixtures import Zerotune

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.open_full_experiment import new_full_experiment

SHORT = StepWindow(start_step=2, end_step=4, max_steps=3)
# As DeepSpeed answers where it has found a device of Intel's.
ON_ANOTHER = """
from deepspeed.accelerator import get_accelerator
type(get_accelerator()).device_name = lambda accelerator, index=None: "xpu"
"""
SCRIPT = """
import argparse, deepspeed, torch
{on_another}
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(4, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
print("trained")
"""
SAID = "DeepSpeed trains on `xpu`, but this host's slots are"


def test_a_trial_says_on_what_its_ranks_have_trained(trials: Any) -> None:
    here = host_of_tests().device
    plan = dataclasses.replace(trials.plan("plain.py", window=SHORT), device=here)
    result = trials.start(plan).result()
    assert result.outcome == "completed", result.reason
    assert (result.trained_on, result.elsewhere) == (here, False)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_trial_on_another_kind_of_device_ends_before_its_engine_is_built(trials: Any, slots: int) -> None:
    other = "cuda" if host_of_tests().device == "cpu" else "cpu"
    plan = dataclasses.replace(trials.plan("plain.py", window=SHORT, slots=slots), device=other)
    result = trials.start(plan).result()
    assert result.outcome is Outcome.INVALID
    assert result.elsewhere
    assert "this host's slots are" in result.reason
    assert "initialize" not in result.phases


@pytest.mark.long
def test_a_study_whose_ranks_train_elsewhere_fails_with_a_sentence_and_is_resumed_once_that_is_mended(
    tmp_path: Path, home: Path
) -> None:
    zerotune = Zerotune(tmp_path, home)
    script = zerotune.model / "train.py"
    mended = script.read_text()
    script.write_text(mended.replace("import deepspeed\n", f"import deepspeed\n{ON_ANOTHER}", 1))
    ended = zerotune.run("asha", "-mt", "3")
    assert ended.returncode == 1
    assert SAID in ended.stderr
    assert "Set DS_ACCELERATOR=cpu" in ended.stderr
    assert zerotune.study.record["status"] == "failed"
    assert zerotune.study.told == []
    script.write_text(mended)
    ended = zerotune.run("resume", zerotune.study.paths.root)
    assert ended.returncode == 0, ended.stderr
    assert zerotune.study.record["status"] == "completed"


@pytest.mark.long
def test_a_full_experiment_elsewhere_ends_at_its_first_attempt(folder: Folder) -> None:
    arguments = folder.write_script(max_restarts=3)
    (folder.model / "train.py").write_text(SCRIPT.format(on_another=ON_ANOTHER))
    end = run_to_its_end(new_full_experiment(arguments, folder.root))
    assert not end.completed
    assert SAID in end.reason
    assert folder.record["attempts"] == 1
    (folder.model / "train.py").write_text(SCRIPT.format(on_another=""))
    assert run_to_its_end(new_full_experiment(arguments, folder.root)).completed
