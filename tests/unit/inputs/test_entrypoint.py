import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.inputs.entrypoint import Entrypoint, default_interpreter, parse_entrypoint
from zerotune.trial_lib.messages.errors import InputError


@pytest.mark.parametrize("command", ["python3 train.py --lr 0.1", ["python", "train.py", "--lr", "0.1"]])
def test_a_plain_command_is_a_script_and_its_arguments(command: str | list[str]) -> None:
    assert parse_entrypoint(command) == Entrypoint(script="train.py", arguments=("--lr", "0.1"))


def test_arguments_stay_byte_for_byte() -> None:
    command = r"""python train.py --prompt 'a && b; $HOME' --re "x\\d" "" --pattern '*.py' -- -u ünï"""
    expected = ("--prompt", "a && b; $HOME", "--re", r"x\d", "", "--pattern", "*.py", "--", "-u", "ünï")
    assert parse_entrypoint(command).arguments == expected


@given(st.lists(st.text()))
def test_the_arguments_of_a_list_stay_as_they_are(arguments: list[str]) -> None:
    assert parse_entrypoint(["python", "train.py", *arguments]).arguments == tuple(arguments)


@given(st.text())
def test_any_line_is_an_entrypoint_or_an_input_error(command: str) -> None:
    try:
        entrypoint = parse_entrypoint(command)
    except InputError:
        return
    assert entrypoint.script or entrypoint.module or entrypoint.trial_class


def test_a_line_may_go_on_behind_a_backslash() -> None:
    assert parse_entrypoint("python train.py \\\n  --lr 1\n").arguments == ("--lr", "1")


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        ("python train.py", None),
        ("python3 train.py", None),
        ("/opt/env/bin/python train.py", "/opt/env/bin/python"),
        ("./env/bin/python3.11 train.py", "./env/bin/python3.11"),
        ("/opt/env/bin/deepspeed train.py", "/opt/env/bin/python"),
        ("env/bin/torchrun train.py", "env/bin/python"),
    ],
)
def test_a_path_names_the_interpreter(command: str, interpreter: str | None) -> None:
    assert parse_entrypoint(command).interpreter == interpreter


def test_a_module_may_stand_for_the_script() -> None:
    assert parse_entrypoint("python -u -m pkg.train --x") == Entrypoint(
        module="pkg.train", arguments=("--x",), interpreter_options=("-u",)
    )


def test_assignments_before_the_command_are_its_environment() -> None:
    entrypoint = parse_entrypoint("A=1 B='x y' python train.py C=3")
    assert entrypoint.environment == {"A": "1", "B": "x y"}
    assert entrypoint.arguments == ("C=3",)


def test_what_the_deepspeed_launcher_decides_is_left_out_with_a_note() -> None:
    entrypoint = parse_entrypoint("deepspeed --num_gpus 4 --master_port=29501 --num_nodes 1 train.py --num_gpus 7")
    assert entrypoint.script == "train.py"
    assert entrypoint.arguments == ("--num_gpus", "7")
    assert entrypoint.local_rank_option == "--local_rank"
    assert entrypoint.notes == (
        "--num_gpus 4 is left out: resources.slots_per_trial says how many ranks start.",
        "--master_port 29501 is left out: every trial has a port of its own.",
        "--num_nodes 1 is left out: a trial runs on one node.",
    )


def test_the_deepspeed_launcher_may_start_a_module_without_local_rank() -> None:
    entrypoint = parse_entrypoint("deepspeed --no_local_rank --module pkg.train --x")
    assert entrypoint == Entrypoint(module="pkg.train", arguments=("--x",))


@pytest.mark.parametrize("launcher", ["torchrun", "python -m torch.distributed.run"])
def test_torchrun_is_understood_in_both_spellings(launcher: str) -> None:
    entrypoint = parse_entrypoint(f"{launcher} --standalone --nnodes 1 --nproc-per-node=2 train.py --x")
    assert entrypoint.script == "train.py"
    assert entrypoint.arguments == ("--x",)
    assert entrypoint.local_rank_option == ""
    assert len(entrypoint.notes) == 3


@pytest.mark.parametrize("rest", ["python3 train.py --x", "train.py --x", "-- python3 train.py --x"])
def test_determineds_launcher_is_left_out(rest: str) -> None:
    entrypoint = parse_entrypoint(f"python3 -m determined.launch.deepspeed {rest}")
    assert (entrypoint.script, entrypoint.arguments) == ("train.py", ("--x",))


@pytest.mark.parametrize(
    "command",
    [
        "model_def:MyTrial",
        "python3 -m determined.launch.deepspeed --trial model_def:MyTrial",
        "python3 -m determined.launch.deepspeed --num_gpus 2 --trial=model_def:MyTrial",
        "python3 -m determined.launch.torch_distributed --trial model_def:MyTrial",
        "python3 -m zerotune.trial_lib.training --trial model_def:MyTrial",
        "python3 -m trial_lib.training --trial model_def:MyTrial",
        "deepspeed --module zerotune.trial_lib.training --trial model_def:MyTrial",
    ],
)
def test_a_trial_class_stands_alone_or_behind_a_launcher(command: str) -> None:
    entrypoint = parse_entrypoint(command)
    assert (entrypoint.trial_class, entrypoint.script, entrypoint.module) == ("model_def:MyTrial", None, None)


def test_a_trial_class_keeps_its_interpreter_and_environment() -> None:
    entrypoint = parse_entrypoint("A=1 env/bin/python -m determined.launch.deepspeed --trial pkg.model_def:MyTrial")
    assert entrypoint.trial_class == "pkg.model_def:MyTrial"
    assert entrypoint.interpreter == "env/bin/python"
    assert entrypoint.environment == {"A": "1"}


REFUSALS = {
    "": "names no command",
    "python": "names no script",
    "python -c 1": "option -c is not supported",
    "python -O train.py": "option -O is not supported",
    "python -m": "nothing follows python -m",
    "python -m a-b": "'a-b' is not the name of a module",
    "python3.10 train.py": "may be another Python than ZeroTune's own",
    "bash run.sh": "begins with 'bash', which ZeroTune cannot start",
    "accelerate launch train.py": "begins with 'accelerate'",
    "python -m torch.distributed.launch --nnodes=2 train.py": "--nnodes 2 asks for several nodes",
    "deepspeed --hostfile hosts train.py": "the option --hostfile of the launcher deepspeed is not supported",
    "deepspeed --include=localhost:0 train.py": "the option --include of",
    "deepspeed --num_nodes 2 train.py": "--num_nodes 2 asks for several nodes",
    "deepspeed --num_gpus": "nothing follows --num_gpus",
    "torchrun --nnodes=1:4 train.py": "--nnodes 1:4 asks for several nodes",
    "model_def:MyTrial --lr 1": "--lr follows the trial class model_def:MyTrial, which takes no arguments",
    "python3 -m determined.launch.deepspeed --trial model_def": "'model_def' is not a trial class",
    "python3 -m determined.launch.deepspeed --trial": "nothing follows --trial",
    "python3 -m zerotune.trial_lib.training spec.json": "zerotune.trial_lib.training is given no trial class",
    "cd a && python train.py": "the entrypoint has '&&', which only a shell understands",
    "python train.py | tee log": "the entrypoint has '|'",
    "python train.py; ls": "the entrypoint has ';'",
    "python train.py > log": "the entrypoint has '>'",
    "python train.py --home $HOME": "the entrypoint has '$'",
    'python train.py "$(pwd)"': "the entrypoint has '$'",
    "python train.py ~/data": "the entrypoint has '~'",
    "python train.py *.txt": "the entrypoint has '*'",
    "python train.py\nls": "the entrypoint has '\\n'",
    "python 'train.py": "cannot be split into words (no closing quotation)",
}


@pytest.mark.parametrize(("command", "message"), REFUSALS.items(), ids=REFUSALS.keys())
def test_what_cannot_be_started_is_refused_by_name(command: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_entrypoint(command, where="here")
    assert message in refused.value.what
    assert refused.value.where == "here"
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--deepspeed ds.json", ("ds.json",)),
        ("--deepspeed=ds.json", ("ds.json",)),
        ("--deepspeed_config other.json", ("other.json",)),
        ("--deepspeed --deepspeed_config ds.json", ("ds.json",)),
        ("--deepspeed --lr 1", ()),
        ("--deepspeed", ()),
        ("--my-config ./ds.json", ("./ds.json",)),
        ("--my-config=ds.json ds.json", ("ds.json", "ds.json")),
        ("--data other.json", ()),
    ],
)
def test_the_arguments_that_name_a_configuration_are_found(arguments: str, names: tuple[str, ...]) -> None:
    assert parse_entrypoint(f"python train.py {arguments}", deepspeed_config="ds.json").config_values == names


def test_without_deepspeed_beside_zerotune_a_command_has_the_python_of_the_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_interpreter() == sys.executable
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert default_interpreter() == str(python)
    python.unlink()
    assert default_interpreter() == sys.executable
