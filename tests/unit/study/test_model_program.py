"""The program of `zerotune plan --model`: what is written, its command, and what is no configuration of a model."""

import json
import runpy
from pathlib import Path

import click
import pytest
from pydantic import ValidationError

from zerotune.flows.command_line import cli
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.study.model_program import with_program


def _arguments(
    tmp_path: Path, *words: str, text: str = '{"model_type": "llama"}', name: str = "tiny.json"
) -> PlanArguments:
    (tmp_path / name).write_text(text)
    return PlanArguments(model=tmp_path / name, command=words)


def test_a_trainer_program_is_written_into_the_plan_s_folder_with_its_command(tmp_path: Path) -> None:
    found = with_program(_arguments(tmp_path, "--length", "512"), tmp_path)
    folder = found.model_dir
    assert folder.parent.parent == tmp_path / "zerotune-plans"
    assert folder.parent.name.startswith("tiny-")
    assert found.command[:4] == ("deepspeed", "train.py", "--deepspeed", "ds_config.json")
    assert found.command[-2:] == ("--length", "512")
    compile((folder / "train.py").read_text(), "train.py", "exec")
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ((), (1, 32)),
        (("--per_device_train_batch_size", "4"), (4, 32)),
        (("--gradient_accumulation_steps=2", "--per_device_train_batch_size=8"), (8, 2)),
    ],
)
def test_the_configuration_has_the_batch_of_the_words(
    tmp_path: Path, words: tuple[str, ...], batch: tuple[int, int]
) -> None:
    found = with_program(_arguments(tmp_path, *words), tmp_path)
    options = [word.partition("=")[0] for word in found.command]
    assert options.count("--per_device_train_batch_size") == options.count("--gradient_accumulation_steps") == 1
    config = json.loads((found.model_dir / "ds_config.json").read_text())
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == batch


@pytest.mark.parametrize(
    ("kind", "named", "head"),
    [
        ("llama", [], "LlamaForCausalLM"),
        ("vit", [], "ViTForImageClassification"),
        ("t5", [], "T5ForConditionalGeneration"),
        ("bart", [], "BartForConditionalGeneration"),
        ("bart", ["BartForConditionalGeneration"], "BartForConditionalGeneration"),
        ("bart", ["BartForCausalLM"], "BartForCausalLM"),
        ("whisper", [], "WhisperForConditionalGeneration"),
    ],
)
def test_an_encoder_decoder_is_planned_whole_unless_its_configuration_names_a_part(
    tmp_path: Path, kind: str, named: list[str], head: str
) -> None:
    import torch

    text = json.dumps({"model_type": kind, "architectures": named})
    folder = with_program(_arguments(tmp_path, text=text), tmp_path).model_dir
    program = runpy.run_path(str(folder / "train.py"))
    with torch.device("meta"):
        model = program["model_of"](program["config_of"](str(folder / "config.json")), program["Options"]())
    assert type(model).__name__ == head


def test_a_folder_of_a_model_names_the_plan(tmp_path: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").write_text('{"model_type": "llama"}')
    found = with_program(PlanArguments(model=tmp_path / "llama-8b"), tmp_path)
    assert found.model_dir.parent.name.startswith("llama-8b-")


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "no JSON"), ("[]", "no `model_type`"), ('{"hidden_size": 8}', "no `model_type`")]
)
def test_what_is_no_configuration_is_refused_and_leaves_nothing(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as refused:
        with_program(_arguments(tmp_path, text=text), tmp_path)
    assert "tiny.json" in str(refused.value)
    assert not (tmp_path / "zerotune-plans").exists()


def test_a_missing_file_and_a_word_for_a_number_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        with_program(PlanArguments(model=tmp_path / "no.json"), tmp_path)
    with pytest.raises(InputError, match='"many" is no number'):
        with_program(_arguments(tmp_path, "--per_device_train_batch_size", "many"), tmp_path)


def test_a_model_is_planned_instead_of_a_yaml_and_may_have_words(tmp_path: Path) -> None:
    assert PlanArguments(model=tmp_path / "config.json").model_dir == tmp_path
    with pytest.raises(ValidationError, match="one of config_path, command and model"):
        PlanArguments(model=tmp_path / "config.json", config_path=tmp_path / "e.yaml", model_dir=tmp_path)
    with pytest.raises(ValidationError):
        PlanArguments(model_dir=tmp_path)


@pytest.mark.parametrize("words", [["--model", "a.json"], ["--model=a.json", "--", "--length", "8"]])
def test_the_command_line_takes_a_model_with_and_without_words(words: list[str]) -> None:
    command = cli.commands["plan"]
    context = click.Context(command, info_name="plan", help_option_names=["-h", "--help"])
    command.parse_args(context, words)
    assert context.params["model"] == Path("a.json")
    assert context.params["typed"] == (("--length", "8") if "--" in words else ())
