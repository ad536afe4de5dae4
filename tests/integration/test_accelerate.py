"""Programs that train with Accelerate: what `accelerate launch` would start, and their trials."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import PROGRAMS, Trials

from zerotune.trial_lib.inputs.accelerate import CONFIG_VARIABLE, parse_accelerate
from zerotune.trial_lib.inputs.words import Words
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

ANY = PROGRAMS / "any"
SHELL = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
# As `accelerate launch` sets it.
UNDER_DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": "no"}
SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)

Run = Callable[..., tuple[TrialResult, dict[str, Any]]]


def words(folder: Path, *typed: str) -> Words:
    return Words(list(typed), "command", follows=True, environment=SHELL, folder=folder)


def test_a_configuration_file_says_what_is_started(tmp_path: Path) -> None:
    plugin = {"deepspeed_config_file": "ds.json", "zero3_init_flag": False}
    own = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": plugin}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    arguments = ["--flag", "a b", "--", "", "ü"]
    typed = words(tmp_path, "--config_file", "own.yaml", "--main_process_port=4000", "train.py", *arguments)
    found = parse_accelerate(typed, sys.executable)

    assert (found["script"], found["slots"], "devices" in found) == ("train.py", 2, False)
    assert typed.rest == arguments
    assert found["config_variables"] == (CONFIG_VARIABLE,)
    variables = found["launcher_environment"]
    assert variables[CONFIG_VARIABLE] == "ds.json"
    assert variables["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert variables["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
    assert "MASTER_PORT" not in variables
    assert [note.split()[0] for note in typed.notes] == ["--main_process_port"]


@pytest.mark.long
def test_options_make_a_configuration_that_only_the_code_knows(tmp_path: Path) -> None:
    options = ["--use_deepspeed", "--num-processes", "2", "--gpu_ids", "1,3", "--zero_stage", "3"]
    found = parse_accelerate(words(tmp_path, *options, "-m", "package.module", "x"), None)

    assert (found["module"], found["slots"], found["devices"]) == ("package.module", 2, (1, 3))
    assert "config_variables" not in found
    assert found["launcher_environment"]["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in found["launcher_environment"]


@pytest.mark.long
@pytest.mark.parametrize("option", [[], ["--num_cpu_threads_per_process", "4"]])
def test_accelerate_itself_sets_the_threads_only_if_an_option_names_them(tmp_path: Path, option: list[str]) -> None:
    typed = words(tmp_path, "--use_deepspeed", "--num_processes", "2", *option, "train.py")
    typed.environment["OMP_NUM_THREADS"] = "2"
    found = parse_accelerate(typed, None)
    assert found["launcher_environment"].get("OMP_NUM_THREADS") == (option[-1] if option else None)
    assert ("OMP_NUM_THREADS" in found["launcher_defaults"]) is not bool(option)


def test_without_a_word_about_deepspeed_one_rank_starts_and_the_code_has_to_say_it(tmp_path: Path) -> None:
    typed = words(tmp_path, "train.py")
    found = parse_accelerate(typed, None)
    assert (found["slots"], "ACCELERATE_USE_DEEPSPEED" in found["launcher_environment"]) == (1, False)
    assert "the code has to" in typed.notes[0]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["--use_deepsped", "train.py"], "unrecognized arguments: --use_deepsped"),
        (["--use_deepspeed", "--num_processes", "4", "--num_machines", "2", "train.py"], "--num_machines 2"),
        pytest.param(["--config_file", "absent.yaml", "train.py"], "absent.yaml", marks=pytest.mark.long),
    ],
)
def test_what_accelerate_refuses_or_a_search_cannot_follow_is_named(
    tmp_path: Path, typed: list[str], named: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse_accelerate(words(tmp_path, *typed), None)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def run(trials: Trials) -> Run:
    """Runs a program as a trial, and returns its result and what rank 0 recorded."""

    def run_program(
        script: str, *arguments: str, config: dict[str, Any] | None = None, **options: Any
    ) -> tuple[TrialResult, dict[str, Any]]:
        environment = {**rank_environment(), **options.pop("variables", UNDER_DEEPSPEED)}
        options = {"model_dir": ANY, "window": SHORT, **options}
        plan = trials.plan(script, **options)
        if config is not None:
            environment[CONFIG_VARIABLE] = str(plan.paths.ds_config)
        program = dataclasses.replace(plan.program, arguments=list(arguments), environment=environment)
        plan = dataclasses.replace(plan, program=program, ds_config=plan.candidate.complete(config or {}))
        result = trials.start(plan).result()
        record = plan.paths.measurement(0)
        return result, json.loads(record.read_text()) if record.exists() else {}

    return run_program


@pytest.fixture
def ds_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((ANY / "accelerate_ds.json").read_text())
    return config


def test_a_trial_takes_the_candidates_stage_batch_and_accumulation(run: Run, ds_config: dict[str, Any]) -> None:
    result, record = run(
        "accelerated.py",
        "--per_device_train_batch_size=3",
        config=ds_config,
        micro_batch=3,
        accumulation=4,
        slots=2,
        zero={"stage": 3},
        purpose=Purpose.PROFILE,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 3
    assert record["program"]["ds_config"]["zero_optimization"]["stage"] == 3
    assert record["program"]["optimizer"] == "torch.optim.adamw.AdamW"
    assert record["program"]["by_accelerate"]
    # Four micro-batches of three in an optimizer step: the loop that Accelerate counts follows the candidate.
    per_step = result.metrics["throughput"] * result.metrics["latency"]
    assert round(per_step) == 3 * 4 * 2


def test_the_program_tells_what_it_would_have_used(run: Run) -> None:
    result, record = run(
        "accelerate_plugin.py",
        "--batch-size=1",
        micro_batch=1,
        accumulation=3,
        zero={"stage": 1},
        purpose=Purpose.PROFILE,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert record["program"]["ds_config"]["zero_optimization"]["stage"] == 2
    assert record["program"]["ds_config"]["train_micro_batch_size_per_gpu"] == "auto"
    assert record["program"]["batch"] == {"gradient_accumulation_steps": 2}
    # Accelerate calls backward alone for most micro-batches, and tells DeepSpeed that more follow.
    assert not record["program"]["repeats_backward"]
    assert round(result.metrics["throughput"] * result.metrics["latency"]) == 3


def test_a_trial_leaves_checkpoints_models_and_trackers_alone(
    run: Run, ds_config: dict[str, Any], tmp_path: Path, trials: Trials
) -> None:
    output = tmp_path / "output"
    (output / "checkpoint").mkdir(parents=True)
    (output / "checkpoint" / "precious.bin").write_text("of another stage")
    result, record = run(
        "accelerate_saves.py",
        f"--output_dir={output}",
        config=ds_config,
        micro_batch=1,
        zero={"stage": 2},
        purpose=Purpose.PROFILE,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert [path.name for path in output.rglob("*")] == ["checkpoint", "precious.bin"]
    assert f"saved in {output}/checkpoint" in trials.log(result)
    # The file that the trial gave it says 1; what the file could leave to it, it tells.
    assert record["program"]["batch"] == {"gradient_accumulation_steps": 3}


def test_the_accelerators_own_accumulation_is_what_auto_means(run: Run, tmp_path: Path) -> None:
    result, record = run(
        "accelerate_saves.py", f"--output_dir={tmp_path / 'output'}", micro_batch=1, purpose=Purpose.PROFILE
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert record["program"]["ds_config"]["gradient_accumulation_steps"] == "auto"
    assert record["program"]["batch"] == {"gradient_accumulation_steps": 3}


def test_mixed_precision_of_the_launcher_belongs_to_the_configuration(run: Run) -> None:
    variables = {**UNDER_DEEPSPEED, "ACCELERATE_MIXED_PRECISION": "bf16"}
    result, record = run(
        "accelerate_plugin.py", "--batch-size=2", micro_batch=2, purpose=Purpose.PROFILE, variables=variables
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert record["program"]["ds_config"]["bf16"] == {"enabled": True}


def test_a_data_loader_that_does_not_follow_is_found_out(run: Run, ds_config: dict[str, Any]) -> None:
    result, _ = run("accelerated.py", "--per_device_train_batch_size", "4", config=ds_config, micro_batch=1)
    assert result.outcome is Outcome.INVALID
    assert "--per_device_train_batch_size" in result.reason


def test_a_model_that_accelerate_trains_without_deepspeed_says_so_at_once(run: Run) -> None:
    result, _ = run("accelerated.py", micro_batch=4, variables={})
    assert result.outcome is Outcome.CRASHED
    assert "Accelerate trains this model without DeepSpeed" in result.reason
    assert "--use_deepspeed" in result.reason


@pytest.mark.parametrize("first", ["student", "teacher"])
def test_of_two_plugins_the_one_that_trains_follows_and_the_other_keeps_its_own(
    run: Run, trials: Trials, first: str
) -> None:
    result, record = run(
        "accelerate_teacher.py",
        "--batch-size=3",
        f"--first={first}",
        micro_batch=3,
        accumulation=4,
        zero={"stage": 2},
        purpose=Purpose.PROFILE,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    log = trials.log(result)
    assert "student: stage 2, 3 samples" in log
    assert "teacher: stage 0, 1 samples" in log
    assert "accumulation: 4" in log
    assert record["program"]["ds_config"]["zero_optimization"]["stage"] == 1
    assert round(result.metrics["throughput"] * result.metrics["latency"]) == 3 * 4
