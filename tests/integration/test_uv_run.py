"""`uv run` in a typed command. A small script stands in for uv: it runs a command in the environment beside it."""

import os
import sys
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, parse_entrypoint
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.followed import followed
from zerotune.trial_lib.study.program import KnownProgram, environment_of, interpreter_of
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.study.typed_command import read_command

UV = """#!/bin/sh
echo "$@" >> {folder}/uv.log
test "$1" = run || exit 2
shift
while test "${{1#-}}" != "$1"; do
    case $1 in
        --extra) test "$2" = gpu || {{ echo "error: Extra \\`$2\\` is not defined" >&2; exit 2; }}; shift 2 ;;
        *) shift ;;
    esac
done
echo "Installed 2 packages" >&2
program=$1; shift
VIRTUAL_ENV={folder}/.venv exec {folder}/.venv/bin/$program "$@"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an environment, in which stand a Python and the launchers; `uv` is on the PATH."""
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    for name in ("python", "python3"):
        (environment / name).symlink_to(sys.executable)
    # By this file Python finds that it is in a virtual environment.
    (environment.parent / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    for name in ("torchrun", "deepspeed"):
        (environment / name).write_text(f"#!{environment / 'python'}\n")
        (environment / name).chmod(0o755)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uv").write_text(UV.format(folder=tmp_path))
    (programs / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    (tmp_path / "train.py").write_text("import deepspeed\n")
    return tmp_path


def typed(folder: Path, command: str, **variables: str) -> Entrypoint:
    shell = {**os.environ, **variables}
    return parse_entrypoint(command.split(), where="the command", folder=folder, shell=shell)


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("uv run train.py --x", {"script": "train.py", "launched_by": None, "slots": None}),
        ("uv run python -u train.py --x", {"script": "train.py", "interpreter_options": ("-u",)}),
        ("uv run -m pkg.train --x", {"module": "pkg.train", "script": None}),
        ("uv run --extra gpu -q -- torchrun --nproc_per_node 2 train.py --x", {"slots": 2, "launched_by": "torchrun"}),
        ("uv run --extra=gpu deepspeed --num_gpus 2 train.py --x", {"slots": 2, "launched_by": "deepspeed"}),
        ("mpirun -np 2 uv run python train.py --x", {"slots": 2, "launched_by": "mpirun"}),
    ],
)
def test_what_uv_runs_is_read_in_its_environment(folder: Path, command: str, fields: dict[str, object]) -> None:
    entrypoint = typed(folder, command)
    assert {name: getattr(entrypoint, name) for name in fields} == fields
    assert entrypoint.interpreter == str(folder / ".venv" / "bin" / "python")
    assert entrypoint.arguments == ("--x",)
    assert entrypoint.launcher == tuple(command.split()[:-1])
    assert entrypoint.launcher_environment == {"VIRTUAL_ENV": str(folder / ".venv")}
    assert any(note.startswith("uv run is left out: ") for note in entrypoint.notes)


def test_uv_reads_its_own_options_and_nothing_of_the_program_runs(folder: Path) -> None:
    (folder / "train.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    typed(folder, "uv run --extra gpu -m train")
    (asked,) = (folder / "uv.log").read_text().splitlines()
    assert asked.startswith("run --extra gpu python -c import sys")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("uv run", "uv run names no command"),
        ("uv sync", "uv starts a training by `uv run`"),
        ("uv run --with rich train.py", "the option --with of the launcher uv run is not supported"),
        ("uv run --env-file .env train.py", "which variables are secret"),
        ("uv run --directory code train.py", "change to that folder before zerotune"),
        ("uv run --extra none train.py", "uv run cannot be asked for its environment (error: Extra `none`"),
        ("uv run mpirun -np 2 python train.py", "uv run starts mpirun"),
        ("uv run --extr gpu train.py", "the option --extr of the launcher uv run"),
        ("uv run --extra gpu brush train.sh", "brush is not found."),
        ("uv run own.py", "own.py lists requirements of its own"),
        ("none/uv run train.py", "none/uv cannot be started"),
    ],
)
def test_what_uv_would_not_run_in_the_project_is_refused(folder: Path, command: str, said: str) -> None:
    (folder / "own.py").write_text("# /// script\n# dependencies = ['rich']\n# ///\n")
    with pytest.raises(InputError) as refused:
        typed(folder, command)
    assert said in refused.value.what
    assert refused.value.remedy


def test_variables_from_a_file_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="UV_ENV_FILE is set"):
        typed(folder, "uv run train.py", UV_ENV_FILE=".env")


def test_the_command_to_train_with_is_typed_by_uv_again(folder: Path) -> None:
    (folder / "ds.json").write_text("{}")
    command = "uv run --extra gpu torchrun --nproc_per_node 2 train.py --deepspeed_config ds.json"
    host = Host("cpu", ["0", "1"], 2**30)
    experiment = read_command(command.split(), {}, folder, host)
    assert interpreter_of(experiment) == str(folder / ".venv" / "bin" / "python")
    assert environment_of(experiment, (), "cpu")["VIRTUAL_ENV"] == str(folder / ".venv")
    paths, arguments = StudyPaths(folder / "study"), StudyArguments(command=tuple(command.split()), model_dir=folder)
    setup = StudySetup("s", 0.0, experiment, arguments, paths, host, {})
    last = training_command(setup, KnownProgram.of(experiment), {}).splitlines()[-1]
    assert last == command.replace("ds.json", str(paths.best_ds_config))


@pytest.mark.parametrize("command", ["uv run train.py", "uv run torchrun train.py", "uv run --with rich train.py"])
def test_what_is_read_is_not_run(folder: Path, command: str) -> None:
    assert followed(command.split(), folder, lambda sentence: None).words == tuple(command.split())
    assert not (folder / "uv.log").exists()


def test_a_shell_that_uv_runs_is_followed(folder: Path) -> None:
    (folder / ".venv" / "bin" / "bash").symlink_to("/bin/bash")
    (folder / "run.sh").write_text("exec .venv/bin/torchrun --nproc_per_node 2 train.py\n")
    (folder / ".venv" / "bin" / "torchrun").write_text(f"#!{folder}/.venv/bin/python\nimport time\ntime.sleep(60)\n")
    found = followed(["uv", "run", "bash", "run.sh"], folder, lambda sentence: None)
    assert found.words[-4:] == (f"{folder}/.venv/bin/torchrun", "--nproc_per_node", "2", "train.py")
