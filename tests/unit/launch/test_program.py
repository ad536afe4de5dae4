"""The environment that a rank is started in."""

from dataclasses import replace
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.rank_starter import HostRanks, Program, rank_requests

PROGRAM = Program("python", {"script": "train.py"}, [], False, Path("/model"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})


def test_ranks_number_the_gpus_as_the_slots_are_numbered() -> None:
    (rank,) = rank_requests(PROGRAM, Host("cuda", ["0", "1"], 1), ["1"], 2900, [Path("rank0.log")])
    assert rank.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert rank.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("launcher", [None, "deepspeed"])
def test_ranks_have_the_variables_that_deepspeed_gives_them(launcher: str | None) -> None:
    program, host, logs = replace(PROGRAM, launched_by=launcher), Host("cpu", ["0", "1"], 1), [Path("0"), Path("1")]
    given = [rank.environment for rank in rank_requests(program, host, ["0", "1"], 2900, logs)]
    assert [each["LOCAL_RANK"] for each in given] == ["0", "1"]
    assert {(each["LOCAL_SIZE"], each["CROSS_RANK"], each["CROSS_SIZE"]) for each in given} == {("2", "0", "1")}
    third = HostRanks(first_rank=4, slots=2, world_size=6, address="10.0.0.1", port=2900)
    given = [rank.environment for rank in rank_requests(program, host, ["0", "1"], 2900, logs, third)]
    assert [each["RANK"] for each in given] == ["4", "5"]
    assert {(each["LOCAL_SIZE"], each["CROSS_RANK"], each["CROSS_SIZE"]) for each in given} == {("2", "2", "3")}


def test_ranks_of_another_launcher_have_no_variables_of_deepspeeds() -> None:
    program = replace(PROGRAM, launched_by="torchrun")
    (rank,) = rank_requests(program, Host("cpu", ["0"], 1), ["0"], 2900, [Path("rank0.log")])
    assert rank.environment["LOCAL_WORLD_SIZE"] == "1"
    assert not {"LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"} & set(rank.environment)


@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("torchrun", {"RANK": "5", "GROUP_RANK": "0", "ROLE_RANK": "5", "TORCHELASTIC_USE_AGENT_STORE": "False"}),
        ("mpirun", {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6"}),
        ("srun", {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6"}),
    ],
)
def test_a_rank_is_told_which_one_it_is_as_its_launcher_tells_it(launcher: str, names: dict[str, str]) -> None:
    program, logs = replace(PROGRAM, launched_by=launcher), [Path("0"), Path("1")]
    part = HostRanks(first_rank=4, slots=2, world_size=6, address="10.0.0.1", port=2900)
    _, last = rank_requests(program, Host("cpu", ["0", "1"], 1), ["0", "1"], 2900, logs, part)
    assert {name: last.environment.get(name) for name in names} == names
    assert ("TORCHELASTIC_RUN_ID" in last.environment) == (launcher == "torchrun")
