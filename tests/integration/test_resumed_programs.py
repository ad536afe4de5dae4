"""A program that goes on from a checkpoint of DeepSpeed's is tried at every stage, as if it began."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CONFIG, Trials
from foreseen_fixtures import PROGRAMS, program_named
from server_fixtures import free_port

from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.plan.simulation import Pretended, simulate
from zerotune.trial_lib.records.candidate import Purpose

SHORT = StepWindow(1, 3, max_steps=2)
STAGE = 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint that the program has written after three steps, without ZeroTune."""
    folder = tmp_path_factory.mktemp("saved")
    config, checkpoints = folder / "ds_config.json", folder / "checkpoints"
    config.write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": STAGE}}))
    words = ["resumes.py", "--deepspeed_config", str(config), "--folder", str(checkpoints), "--saves_after", "3"]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    subprocess.run([sys.executable, *words], cwd=PROGRAMS, env=environment, check=True, timeout=200)
    return checkpoints


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_it_trains_at_a_stage_at_which_deepspeed_cannot_load_the_checkpoint(
    trials: Trials, saved: Path, stage: int
) -> None:
    before = {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()}
    options = {"window": SHORT, "zero": {"stage": stage}, "purpose": Purpose.PROFILE}
    result = trials.run("resumes.py", "--folder", str(saved), **options)
    assert result.outcome == "completed", result.reason
    assert "goes on after step 3, engine at 3, from mp_rank_00_model_states.pt" in trials.log(result)
    assert result.program is not None
    assert result.program.resumed_stage == STAGE
    assert {file: file.read_bytes() for file in saved.rglob("*") if file.is_file()} == before


def test_without_a_checkpoint_it_begins(trials: Trials, tmp_path: Path) -> None:
    result = trials.run("resumes.py", "--folder", str(tmp_path / "none"), window=SHORT, purpose=Purpose.PROFILE)
    assert result.outcome == "completed", result.reason
    assert result.program is not None
    assert result.program.resumed_stage is None


@pytest.mark.long
def test_it_is_foreseen_on_more_ranks_than_the_checkpoint_has(
    warm_starter: WarmStarter, saved: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3}}))
    program = program_named("resumes.py", "--deepspeed_config", str(config), "--folder", str(saved))
    run = simulate(program, {}, Pretended(world=4, ranks_per_host=4), tmp_path / "run", warm_starter, deadline_s=120.0)
    assert run.stopped == ""
    assert run.program["resumed_stage"] == STAGE
