"""Trials of programs that compile: what a trial compiles is what the training does."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CONFIG, PROGRAMS
from server_fixtures import free_port

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

ONE_STEP = StepWindow(1, 1, max_steps=1)
# Each takes seconds: the others are compiled by the same functions of PyTorch.
LONG = pytest.mark.long
WAYS = ["fullgraph", "flex", *(pytest.param(way, marks=LONG) for way in ("function", "model", "engine"))]
# Two products of matrices, of which the first has no gradient of its inputs.
FORWARD = 2 * (24 * 64 + 64 * 8)
FLOPS = 3 * FORWARD - 2 * 24 * 64


def graphs(log: str) -> list[int]:
    """The graphs that were made in each step."""
    steps = re.split(r"^step \d+$", log, flags=re.MULTILINE)[1:]
    return [len(re.findall(r"^graph", step, re.MULTILINE)) for step in steps]


def plain(folder: Path, *arguments: str) -> list[int]:
    """Runs the program by itself, and returns the graphs of its first five steps."""
    config = folder / "plain.json"
    config.write_text(json.dumps({**CONFIG, "train_micro_batch_size_per_gpu": 2}))
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    run = subprocess.run(
        [sys.executable, "compiles.py", "--deepspeed_config", str(config), "--steps", "5", *arguments],
        cwd=PROGRAMS,
        env={**os.environ, **variables, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=True,
    )
    return graphs(run.stdout)


def completed(result: TrialResult) -> TrialResult:
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


@pytest.mark.parametrize("way", [pytest.param("fullgraph", marks=LONG), pytest.param("flex", marks=LONG), *WAYS[2:]])
def test_a_trial_makes_the_graphs_that_the_training_makes(trials: Any, tmp_path: Path, way: str) -> None:
    expected = plain(tmp_path, "--way", way)
    assert expected[0] > 0
    result = completed(trials.run("compiles.py", "--way", way))
    made = graphs(trials.log(result))
    assert made[:5] == expected
    assert sum(made) == sum(expected)


@pytest.mark.long
def test_a_step_in_which_one_rank_compiles_counts_on_no_rank(trials: Any) -> None:
    plan = trials.plan("compiles.py", "--recompiles_at", "4", slots=2, window=StepWindow(3, 5, max_steps=3))
    completed(trials.start(plan).result())
    # Of steps 3 to 6 the fourth does not count, on neither rank.
    assert [len(graphs(plan.paths.log(rank).read_text())) for rank in range(2)] == [6, 6]


@pytest.mark.parametrize("way", [*WAYS, pytest.param("eager", marks=pytest.mark.long)])
def test_the_profile_counts_what_is_compiled_and_compiles_it_all_the_same(trials: Any, way: str) -> None:
    result = completed(trials.run("compiles.py", "--way", way, purpose=Purpose.PROFILE, window=ONE_STEP))
    assert (sum(graphs(trials.log(result))) > 0) == (way != "eager")
    assert result.profile is not None
    assert result.program is not None
    assert result.program.compiles_engine == (way == "engine")
    # Of flex attention two products more, of two rows each.
    attention = 2 * 2 * 2 * 24 if way == "flex" else 0
    assert result.profile.flops_per_sample == pytest.approx(FLOPS + attention)


@pytest.mark.parametrize("way", ["branch", pytest.param("loop", marks=pytest.mark.long)])
def test_a_program_that_cannot_be_run_uncompiled_is_profiled_without_its_flops(trials: Any, way: str) -> None:
    result = completed(trials.run("compiles.py", "--way", way, purpose=Purpose.PROFILE, window=ONE_STEP))
    assert sum(graphs(trials.log(result))) > 0
    assert result.profile is not None
    assert (result.profile.flops_per_sample, result.profile.num_params) == (0.0, 24 * 64 + 64 + 64 * 8 + 8)


@pytest.mark.long
@pytest.mark.parametrize("purpose", [Purpose.PROFILE, Purpose.SEARCH])
def test_kernels_are_built_within_a_slots_budget(trials: Any, purpose: Purpose) -> None:
    window = ONE_STEP if purpose is Purpose.PROFILE else StepWindow()
    arguments = ("--way", "fullgraph", "--backend", "inductor")
    result = completed(trials.run("compiles.py", *arguments, purpose=purpose, window=window, memory_limit=2**30))
    # What is built is built before the steps that count.
    assert max(result.step_times) < 0.5
    assert (result.profile is not None and result.profile.flops_per_sample == pytest.approx(FLOPS)) == (
        purpose is Purpose.PROFILE
    )
