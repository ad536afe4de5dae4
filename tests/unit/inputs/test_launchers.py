"""Commands as they are typed: every option of a launcher is followed, left out with a note, or refused by name."""

import argparse
import ast
import socket
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs import entrypoint as reading
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, parse_entrypoint
from zerotune.trial_lib.inputs.launchers import DEEPSPEED, LAUNCHERS, TORCHRUN
from zerotune.trial_lib.messages.errors import InputError

# {"localhost": [0, 1]}, as DeepSpeed's launcher writes it.
WORLD = "--world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19"
ROOT = Path(__file__).parents[3]


def typed(command: str, folder: Path = Path(), **variables: str) -> Entrypoint:
    return parse_entrypoint(command.split(" "), folder=folder, where="the command", shell=variables)


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("deepspeed train.py", {"slots": "memory_nodes", "local_rank_option": "--local_rank"}),
        ("deepspeed --num_gpus 2 train.py", {"slots": 2}),
        ("deepspeed --num_accelerators=2 train.py", {"slots": 2}),
        ("deepspeed --num_gpu 2 train.py", {"slots": 2}),  # as argparse has it
        ("deepspeed --num_gpus -1 train.py", {"slots": "memory_nodes"}),
        ("deepspeed --include localhost:1,0 train.py", {"slots": 2, "devices": (0, 1)}),
        ("deepspeed -i localhost:3 train.py", {"slots": 1, "devices": (3,)}),
        ("deepspeed -ilocalhost:3 train.py", {"slots": 1, "devices": (3,)}),
        ("deepspeed --include localhost train.py", {"slots": "memory_nodes"}),
        (f"deepspeed --include {socket.gethostname()}:0 train.py", {"slots": 1, "devices": (0,)}),
        ("deepspeed --exclude localhost:0 train.py", {"slots": "all", "excluded_devices": (0,)}),
        ("deepspeed --module pkg.train", {"script": None, "module": "pkg.train"}),
        ("deepspeed --no_local_rank train.py", {"local_rank_option": ""}),
        ("python -m deepspeed.launcher.runner --num_gpus 2 train.py", {"slots": 2}),
        (f"python -m deepspeed.launcher.launch {WORLD} --node_rank=0 train.py", {"slots": 2, "devices": None}),
        (
            "python -u -m deepspeed.launcher.launch --world_info eyJoIjogWzEsIDNdfQ== --no_local_rank --module train",
            {"script": None, "module": "train", "devices": (1, 3), "local_rank_option": ""},
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 train.py",
            {"slots": 2, "launched_by": "torchrun", "local_rank_option": "--local-rank"},
        ),
        ("python -m torch.distributed.launch --use-env train.py", {"slots": 1, "local_rank_option": ""}),
        ("torchrun train.py", {"slots": 1, "local_rank_option": ""}),
        ("torchrun --nproc-per-node=2 train.py", {"slots": 2}),
        ("torchrun --nproc_per_node 2 --nnodes 1 --standalone train.py", {"slots": 2}),
        ("torchrun --nproc_per_node gpu train.py", {"slots": "gpu"}),
        ("torchrun --nproc_per_node cpu train.py", {"slots": "cpu"}),
        ("torchrun --nproc_per_node auto train.py", {"slots": "all"}),
        ("torchrun -m pkg.train", {"script": None, "module": "pkg.train"}),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", {"slots": 2}),
        ("python train.py", {"slots": None}),
        ("python -m pkg.train", {"script": None, "module": "pkg.train", "slots": None}),
        ("A=1 deepspeed train.py", {"environment": {"A": "1"}}),
        ("env A=1 B=x=y deepspeed train.py", {"environment": {"A": "1", "B": "x=y"}}),
    ],
)
def test_the_options_of_a_launcher_are_followed(command: str, fields: dict[str, Any]) -> None:
    entrypoint = typed(f"{command} --num_gpus 7 -m x")
    expected = {"script": "train.py", "arguments": ("--num_gpus", "7", "-m", "x"), **fields}
    assert {name: getattr(entrypoint, name) for name in expected} == expected
    assert not any("resources.slots_per_trial" in note for note in entrypoint.notes)


@pytest.mark.parametrize(
    ("command", "launcher", "words"),
    [
        ("A=1 deepspeed --num_gpus 2 train.py --x", "deepspeed", ("deepspeed", "--num_gpus", "2", "train.py")),
        ("torchrun -m pkg.train --x", "torchrun", ("torchrun", "-m", "pkg.train")),
        ("env A=1 python -u train.py --x", None, ("python", "-u", "train.py")),
    ],
)
def test_the_words_before_the_arguments_are_kept_as_typed(command: str, launcher: str, words: tuple[str, ...]) -> None:
    entrypoint = typed(command)
    assert (entrypoint.launched_by, entrypoint.launcher, entrypoint.arguments) == (launcher, words, ("--x",))


def test_what_a_trial_has_of_its_own_is_left_out_with_a_note() -> None:
    entrypoint = typed("deepspeed --master_port 29501 --num_nodes=1 --launcher pdsh -q --bind_cores_to_rank train.py")
    assert entrypoint.notes == (
        "--master_port 29501 is left out: every trial has a port of its own.",
        "--launcher pdsh is left out: a trial runs on one node.",
        "-q is left out: every rank has a log of its own.",
        "--bind_cores_to_rank is left out: ZeroTune hands out the cores.",
        "--num_nodes 1 is left out: a trial runs on one node.",
    )


def test_torchruns_environment_is_followed_and_its_options_win() -> None:
    assert typed("torchrun train.py", PET_NPROC_PER_NODE="2").slots == 2
    assert typed("PET_NPROC_PER_NODE=3 torchrun train.py").slots == 3
    assert typed("torchrun --nproc_per_node 4 train.py", PET_NPROC_PER_NODE="2").slots == 4
    assert typed("deepspeed --num_gpus 1 train.py", PET_NPROC_PER_NODE="2").slots == 1
    assert typed("torchrun train.py", PET_STANDALONE="0", PET_MODULE="0").script == "train.py"
    with pytest.raises(InputError, match="PET_NNODES 2 asks for several nodes"):
        typed("torchrun train.py", PET_NNODES="2")


@pytest.mark.parametrize(
    ("hostfile", "options", "fields"),
    [
        ("localhost slots=3\n", "", {"slots": 3, "devices": None}),
        (f"# this one\n\n{socket.gethostname()} slots=2\n", "", {"slots": 2, "devices": None}),
        ("localhost slots=3\n", "--num_gpus 2 ", {"slots": 2}),
        ("localhost slots=3\n", "--include localhost:2 ", {"slots": 1, "devices": (2,)}),
        ("localhost slots=3\n", "--exclude localhost:1 ", {"slots": 2, "devices": (0, 2)}),
    ],
)
def test_a_hostfile_with_this_host_says_its_slots(
    tmp_path: Path, hostfile: str, options: str, fields: dict[str, Any]
) -> None:
    (tmp_path / "hosts").write_text(hostfile)
    entrypoint = typed(f"deepspeed --hostfile hosts {options}train.py", tmp_path)
    assert {name: getattr(entrypoint, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("hostfile", "said"),
    [
        ("worker-0 slots=4\n", "names the host worker-0, and a search runs on this one"),
        ("localhost 4\n", "has the line 'localhost 4'"),
        ("# nothing\n", "names no host"),
        ("localhost slots=1\nlocalhost slots=2\n", "names localhost twice"),
        ("localhost slots=0\n", "gives localhost no slots"),
    ],
)
def test_a_hostfile_that_cannot_be_followed_is_refused(tmp_path: Path, hostfile: str, said: str) -> None:
    (tmp_path / "hosts").write_text(hostfile)
    with pytest.raises(InputError) as refused:
        typed("deepspeed --hostfile=hosts train.py", tmp_path)
    assert said in refused.value.what
    with pytest.raises(InputError, match="cannot be read"):
        typed("deepspeed -H none train.py", tmp_path)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [("", {"node-1": 4, "node-2": 4}), ("--num_nodes 2 ", {"node-1": 4, "node-2": 4}), ("--num_nodes 1 ", {})],
)
def test_a_hostfile_with_several_hosts_has_each_trial_span_them(
    tmp_path: Path, options: str, hosts: dict[str, int]
) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=4\nnode-2 slots=4\n")
    entrypoint = typed(f"deepspeed --hostfile hosts {options}train.py", tmp_path)
    named = {name.replace(socket.gethostname(), "node-1"): slots for name, slots in entrypoint.hosts.items()}
    assert named == hosts
    assert entrypoint.slots == (8 if hosts else 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--include node-1:0", "--include chooses among the slots of 2 hosts (node-1, node-2)"),
        ("--num_gpus 2", "--num_gpus chooses among the slots of 2 hosts"),
        ("--num_nodes 3", "--num_nodes 3 is not between 1 and the 2 host(s)"),
    ],
)
def test_what_chooses_among_several_hosts_is_refused(tmp_path: Path, options: str, said: str) -> None:
    (tmp_path / "hosts").write_text("node-1 slots=4\nnode-2 slots=4\n")
    with pytest.raises(InputError) as refused:
        typed(f"deepspeed --hostfile hosts {options} train.py", tmp_path)
    assert said in refused.value.what


def test_deepspeeds_own_hostfile_is_read_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DEFAULT_HOSTFILE", tmp_path / "hostfile")
    assert typed("deepspeed train.py").slots == "memory_nodes"
    (tmp_path / "hostfile").write_text("localhost slots=5\n")
    assert typed("deepspeed train.py").slots == 5


REFUSALS = {
    "deepspeed --num_nodes 2 train.py": "--num_nodes 2 asks for several nodes",
    "deepspeed --node_rank 1 train.py": "--node_rank 1 asks for several nodes",
    "deepspeed --num_gpus two train.py": "--num_gpus two is no number",
    "deepspeed --num_gpus": "nothing follows --num_gpus",
    "deepspeed --num_gpsu 2 train.py": "the option --num_gpsu of the launcher deepspeed is not supported",
    "deepspeed --num 2 train.py": "the option --num of the launcher deepspeed is not supported",
    "deepspeed --include worker-1:0 train.py": "--include names the host worker-1",
    "deepspeed --include localhost:0@worker-1:0 train.py": "--include names the host worker-1",
    "deepspeed --include localhost:a train.py": "--include localhost:a names no devices",
    "deepspeed --include localhost: train.py": "--include localhost: names no devices",
    "deepspeed --exclude localhost train.py": "--exclude leaves no device",
    "deepspeed --include localhost:0 --num_gpus 1 train.py": "--include and --num_gpus exclude each other",
    "deepspeed --autotuning run train.py": "option --autotuning of the launcher deepspeed is not supported: ZeroTune",
    "deepspeed --no_python train.sh": "ZeroTune starts Python programs only",
    "deepspeed --force_multi train.py": "the launcher of several nodes",
    "deepspeed --elastic_training train.py": "a trial has the same ranks from its beginning to its end",
    "deepspeed --min_elastic_nodes 1 train.py": "a trial has the same ranks from its beginning to its end",
    "deepspeed --venv_script env.sh train.py": "activate the environment before zerotune",
    "deepspeed": "names no script",
    "torchrun --nnodes 2 train.py": "--nnodes 2 asks for several nodes",
    "torchrun --nnodes=1:4 train.py": "--nnodes 1:4 asks for several nodes",
    "torchrun --nproc_per_node 0 train.py": "--nproc_per_node 0 is no number of processes",
    "torchrun --nproc_per_node xpu train.py": "--nproc_per_node xpu is no number of processes",
    "torchrun --run-path train.py": "--run_path of the launcher torchrun is not supported",
    "torchrun --virtual-local-rank train.py": "a rank finds its device by its LOCAL_RANK",
    "torchrun --nprocs 2 train.py": "the option --nprocs of the launcher torchrun is not supported",
    "accelerate test": "accelerate starts a training by `accelerate launch`",
    "python -m deepspeed.launcher.launch --world_info=None train.py": "deepspeed.launcher.launch is given no devices",
    "python -m torch.distributed.launch --nnodes 2 train.py": "asks for several nodes",
    "python -c 1": "option -c is not supported",
    "bash run.sh": "begins with 'bash', which ZeroTune cannot start",
    "env -u A python train.py": "begins with '-u'",
    "A=1": "names no command",
}


@pytest.mark.parametrize(("command", "message"), REFUSALS.items(), ids=REFUSALS.keys())
def test_what_cannot_be_followed_is_refused_by_name(command: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        typed(command)
    assert message in refused.value.what
    assert refused.value.where == "the command"
    assert refused.value.remedy


def test_a_mistyped_option_is_told_the_right_one() -> None:
    with pytest.raises(InputError, match=r"Did you mean --num_gpus\?"):
        typed("deepspeed --num_gpsu 2 train.py")
    with pytest.raises(InputError, match=r"Did you mean --num_gpus or --num_accelerators or --num_nodes\?"):
        typed("deepspeed --num_ 2 train.py")


def test_every_option_that_the_installed_torchrun_knows_is_decided_on() -> None:
    from torch.distributed.run import get_args_parser

    flags = {
        "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag
        for action in get_args_parser()._actions
        for flag in action.option_strings
    }
    assert flags - {"-h", "--help"} == set(TORCHRUN)


def test_every_option_that_the_installed_deepspeed_knows_is_decided_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher import runner

    flags: set[str] = set()
    add = argparse.ArgumentParser.add_argument

    def listen(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        flags.update(name for name in names if name.startswith("-"))
        return add(parser, *names, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", listen)
    runner.parse_args(["train.py"])
    # DeepSpeed 0.18 has the others.
    others = {"--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"}
    assert (flags | others) - {"-h", "--help"} == set(DEEPSPEED)


def test_a_launcher_of_another_environment_names_its_python(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "torchrun"
    program.parent.mkdir()
    program.write_text("#!/opt/env/bin/python3.12\n")
    assert typed(f"{program} train.py").interpreter == "/opt/env/bin/python3.12"
    assert typed("bin/torchrun train.py", tmp_path).interpreter == "/opt/env/bin/python3.12"
    (program.parent / "python").touch()
    assert typed(f"{program} train.py").interpreter == f"{program.parent}/python"


def test_nothing_asks_for_a_launcher_by_its_name() -> None:
    names = {launcher.name for launcher in LAUNCHERS.values()}
    asked: list[str] = []
    for file in (ROOT / "trial_lib").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare) and "launch" in ast.unparse(node).lower():
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                asked += [f"{file.name}: {ast.unparse(node)}"] if constants & names else []
    assert asked == []
