"""Varied and mapped variables that the ranks of a training would not get from the launcher are refused."""

from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.entrypoint import Entrypoint, parse_entrypoint
from zerotune.trial_lib.inputs.search_space import check_switches, read_search_space, refuse_launchers_own
from zerotune.trial_lib.messages.errors import InputError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


def typed(command: str, folder: Path = Path(), **shell: str) -> Entrypoint:
    return parse_entrypoint(command.split(), where="the command", folder=folder, shell=shell)


def refusal(place: str, entrypoint: Entrypoint) -> InputError:
    requests = read_search_space({"program": {place: ["1", "2"]}})
    with pytest.raises(InputError) as refused:
        check_switches(requests, entrypoint, {}, {}, Path())
    with pytest.raises(InputError) as mapped:
        refuse_launchers_own([place], entrypoint)
    assert str(mapped.value) == str(refused.value)
    return refused.value


@pytest.mark.parametrize(
    "command",
    [
        "mpirun -np 2 -x OWN=a python train.py",
        "mpiexec -n 2 -genv OWN a python train.py",
        "mpiexec -n 2 -env OWN a python train.py",
        "mpirun -np 1 -x OWN=a torchrun --nproc_per_node 2 train.py",
        "srun -n 2 --export=ALL,OWN=a python train.py",
    ],
)
def test_a_variable_that_the_launchers_options_set_is_refused(command: str) -> None:
    refused = refusal("OWN", typed(command, **JOB))
    assert refused.what == "the launcher itself sets OWN for each rank, so no value before the command would count."
    assert refused.remedy == ("Leave it out of the launcher's options and files, and write OWN=... before the command.")
    assert refused.where == "OWN"


@pytest.mark.parametrize(
    ("command", "shell"),
    [
        ("srun -n 2 --export=NONE python train.py", {}),
        ("srun -n 2 --export=PATH,OTHER=1 python train.py", {}),
        ("srun -n 2 python train.py", {"SLURM_EXPORT_ENV": "NONE"}),
        ("mpiexec -n 2 -genvnone python train.py", {}),
        ("mpiexec -n 2 -genvlist PATH,HOME python train.py", {}),
    ],
)
def test_a_variable_that_the_launcher_does_not_hand_on_is_refused(command: str, shell: dict[str, str]) -> None:
    refused = refusal("OWN", typed(command, **JOB, **shell))
    assert refused.what == "the launcher does not hand OWN to the ranks."
    assert refused.remedy == "Have the launcher's options hand on all variables, or OWN by its name."


@pytest.mark.parametrize(
    "command",
    [
        "OWN=a deepspeed --num_gpus 2 train.py",
        "OWN=a mpirun -np 2 -x OWN -x OTHER=1 python train.py",
        "mpiexec -n 2 -genvlist PATH,OWN python train.py",
        "mpiexec -n 2 -genvall python train.py",
        "srun -n 2 python train.py",
        "srun -n 2 --export=ALL,OTHER=1 python train.py",
        "srun -n 2 --export=OWN python train.py",
        "torchrun --nproc_per_node 2 train.py",
    ],
)
def test_a_variable_that_reaches_the_ranks_is_varied(command: str) -> None:
    # torchrun sets OMP_NUM_THREADS only if the shell does not (torch/distributed/run.py).
    place = "OMP_NUM_THREADS" if command.startswith("torchrun") else "OWN"
    entrypoint = typed(command, **JOB)
    check_switches(read_search_space({"program": {place: ["1", "2"]}}), entrypoint, {}, {}, Path())


def test_an_argument_of_the_name_is_the_place_and_no_variable() -> None:
    refuse_launchers_own(["own"], typed("mpirun -np 2 -x own=a python train.py own=1"))


def test_deepspeed_over_hosts_hands_on_some_variables_and_sets_those_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("node-1 slots=4\nnode-2 slots=4\n")
    (tmp_path / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\nOWN = a=b \n")
    command = "deepspeed --hostfile hosts train.py"
    entrypoint = typed(command, tmp_path)
    assert entrypoint.launcher_environment == {"NCCL_DEBUG": "WARN", "OWN": "a=b"}
    assert "the launcher itself sets OWN" in refusal("OWN", entrypoint).what
    assert "the launcher itself sets NCCL_DEBUG" in refusal("NCCL_DEBUG", entrypoint).what
    other = refusal("OMP_NUM_THREADS", entrypoint)
    assert other.what == "the launcher does not hand OMP_NUM_THREADS to the ranks of several hosts."
    assert other.remedy == "Tune it on one host, without the hostfile."
    refuse_launchers_own(["NCCL_ALGO"], entrypoint)
    (tmp_path / "hosts").write_text("localhost slots=4\n")
    assert typed(command, tmp_path).launcher_environment == {}


def test_a_file_of_variables_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "hosts").write_text("node-1 slots=4\nnode-2 slots=4\n")
    (tmp_path / "other_env").write_text("NCCL_DEBUG\n")
    with pytest.raises(InputError) as refused:
        typed("deepspeed --hostfile hosts train.py", tmp_path, DS_ENV_FILE="other_env")
    assert refused.value.what == f"{tmp_path / 'other_env'} has the line 'NCCL_DEBUG'."
    assert refused.value.remedy == "Write NAME=VALUE."
