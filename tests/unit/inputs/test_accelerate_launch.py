"""What is made of the answer that accelerate gives (the integration tests ask it), and of the best command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerotune.trial_lib.inputs import accelerate
from zerotune.trial_lib.inputs.accelerate import CONFIG_VARIABLE, accelerate_words, parse_accelerate
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.words import Words
from zerotune.trial_lib.messages.errors import InputError

SHELL = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"}
UNDER_DEEPSPEED = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 2,
}
DS_CONFIG = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}


def words(folder: Path, *typed: str, **environment: str) -> Words:
    return Words(list(typed), "command", follows=True, environment={**SHELL, **environment}, folder=folder)


def configuration(folder: Path, **plugin: Any) -> str:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**UNDER_DEEPSPEED, "deepspeed_config": plugin}))
    (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
    return path.name


Answer = Callable[..., None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Stands in for accelerate."""

    def set_answer(launcher: str = "deepspeed_launcher", given: dict[str, str] | None = None, **settings: Any) -> None:
        variables = {}
        if "gradient_accumulation_steps" in settings:
            variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(settings["gradient_accumulation_steps"])
        if "deepspeed_config_file" in settings:
            variables[CONFIG_VARIABLE] = settings["deepspeed_config_file"]
        defaults = {"num_machines": 1, "num_processes": 2, "gpu_ids": "all", "module": False}
        found = {
            "launcher": launcher,
            "settings": {"training_script": "train.py", **defaults, **settings},
            "given": given or {},
            "arguments": settings.pop("arguments", []),
            "variables": variables,
        }
        monkeypatch.setattr(accelerate, "_ask", lambda words, interpreter: found)

    return set_answer


def refusal(folder: Path, **environment: str) -> str:
    with pytest.raises(InputError) as refused:
        parse_accelerate(words(folder, **environment), None)
    return str(refused.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"launcher": "multi_gpu_launcher", "use_megatron_lm": True}, "use_megatron_lm in accelerate.yaml"),
        ({"launcher": "simple_launcher", "cpu": True, "given": {"cpu": "--cpu"}}, "--cpu cannot be followed"),
        ({"launcher": "simple_launcher", "use_cpu": True}, "use_cpu in accelerate.yaml"),
        ({"launcher": "simple_launcher"}, "one process here, and not the 2"),
        ({"launcher": "sagemaker_launcher"}, "accelerate.yaml starts a sagemaker job"),
        ({"launcher": "tpu_launcher", "tpu": True}, "tpu in accelerate.yaml"),
        ({"no_python": True, "given": {"no_python": "--no_python"}}, "--no_python cannot be followed"),
        ({"given": {"fsdp_offload_params": "--fsdp_offload_params"}}, "--fsdp_offload_params cannot be followed"),
        ({"num_processes": 0}, "finds no device"),
        ({"gpu_ids": "GPU-1"}, "--gpu_ids GPU-1"),
    ],
)
def test_other_ways_to_train_are_refused_by_name(
    tmp_path: Path, answer: Answer, settings: dict[str, Any], named: str
) -> None:
    answer(config_file="accelerate.yaml", **settings)
    assert named in refusal(tmp_path)


def test_an_accumulation_with_two_values_names_both_places(tmp_path: Path, answer: Answer) -> None:
    file = configuration(tmp_path)
    given = {"gradient_accumulation_steps": "--gradient_accumulation_steps"}
    answer(gradient_accumulation_steps=4, deepspeed_config_file="ds.json", given=given)
    message = refusal(tmp_path)
    assert "--gradient_accumulation_steps 4 of accelerate launch" in message
    assert '"gradient_accumulation_steps": 2 in ds.json' in message

    answer(gradient_accumulation_steps=4, config_file=file, arguments=["--gradient_accumulation_steps=8"])
    message = refusal(tmp_path)
    assert "gradient_accumulation_steps: 4 in accelerate.yaml" in message
    assert "--gradient_accumulation_steps=8 behind the script's name" in message

    answer(deepspeed_config_file="ds.json")
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 in the environment" in refusal(
        tmp_path, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4"
    )

    answer(gradient_accumulation_steps=2, deepspeed_config_file="ds.json", arguments=["--lr", "1"])
    assert parse_accelerate(words(tmp_path), None)["slots"] == 2


def launched(*launcher: str, fields: str = "", deepspeed: bool = True, **more: Any) -> Entrypoint:
    environment = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": fields} if deepspeed else {}
    return Entrypoint(script=launcher[-1], launcher=launcher, launcher_environment=environment, **more)


def best(entrypoint: Entrypoint, folder: Path) -> str:
    config = {"gradient_accumulation_steps": 8}
    return " ".join(accelerate_words(entrypoint, config, Path("/s/best.json"), folder / "best.yaml", folder))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("accelerate launch --deepspeed_config_file ds.json t.py", "accelerate launch --deepspeed_config_file {} t.py"),
        ("accelerate launch --deepspeed-config-file=a t.py", "accelerate launch --deepspeed-config-file={} t.py"),
        (
            "python -m accelerate.commands.launch t.py",
            "python -m accelerate.commands.launch --deepspeed_config_file {} t.py",
        ),
        (
            "/env/bin/accelerate launch --gradient_accumulation_steps 2 -m a.b",
            "/env/bin/accelerate launch --deepspeed_config_file {} --gradient_accumulation_steps 8 -m a.b",
        ),
    ],
)
def test_the_best_command_is_the_users_own_with_another_configuration(
    tmp_path: Path, typed: str, expected: str
) -> None:
    assert best(launched(*typed.split()), tmp_path) == expected.format("/s/best.json")
    assert not (tmp_path / "best.yaml").exists()


def test_a_plugin_in_the_code_is_told_by_a_variable(tmp_path: Path) -> None:
    assert best(launched("accelerate", "launch", "t.py", deepspeed=False), tmp_path) == (
        f"env {CONFIG_VARIABLE}=/s/best.json accelerate launch t.py"
    )


def test_a_configuration_that_the_scripts_arguments_name_leaves_the_launcher_alone(tmp_path: Path) -> None:
    entrypoint = launched("accelerate", "launch", "t.py", arguments=("--deepspeed", "ds.json"), config_positions=(1,))
    assert best(entrypoint, tmp_path) == "accelerate launch t.py"


def test_settings_for_deepspeed_in_accelerates_own_file_give_way(tmp_path: Path) -> None:
    file = configuration(tmp_path, zero_stage=2, gradient_accumulation_steps=4, zero3_init_flag=False)
    fields = "zero_stage,gradient_accumulation_steps,zero3_init_flag"
    entrypoint = launched("accelerate", "launch", "--config_file", file, "t.py", fields=fields)
    assert best(entrypoint, tmp_path) == (
        f"accelerate launch --deepspeed_config_file /s/best.json --config_file {tmp_path}/best.yaml t.py"
    )
    written = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert written == {**UNDER_DEEPSPEED, "deepspeed_config": {"zero3_init_flag": False}}


@pytest.mark.parametrize(("given", "is_default"), [({}, True), ({"num_cpu_threads_per_process": "--threads"}, False)])
def test_the_shells_number_of_threads_counts_unless_an_option_names_one(
    tmp_path: Path, answer: Answer, given: dict[str, str], is_default: bool
) -> None:
    answer(given=given, num_cpu_threads_per_process=4)
    found = parse_accelerate(words(tmp_path, OMP_NUM_THREADS="4"), None)
    assert ("OMP_NUM_THREADS" in found["launcher_defaults"]) is is_default
    assert found["launcher_environment"] == ({} if is_default else {"OMP_NUM_THREADS": "4"})
