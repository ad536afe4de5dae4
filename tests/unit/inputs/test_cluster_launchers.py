"""`mpirun` and `srun` in a command that was typed. Their words alone are read: no test has either."""

import socket
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.entrypoint import Entrypoint, parse_entrypoint
from zerotune.trial_lib.messages.errors import InputError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


def typed(command: str, **shell: str) -> Entrypoint:
    return parse_entrypoint(command.split(), where="the command", folder=Path(), shell=shell)


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        ("mpirun -np 2 python train.py --x", {"slots": 2, "script": "train.py", "launched_by": "mpirun"}),
        ("/opt/mpi/bin/orterun -n 3 python train.py", {"slots": 3, "launched_by": "mpirun", "interpreter": None}),
        ("mpiexec -n 4 python -m pkg.train", {"slots": 4, "module": "pkg.train", "launched_by": "mpirun"}),
        (
            "mpirun --allow-run-as-root -np 2 -x A=1 -x PATH --mca btl tcp -H localhost:2 python -u train.py",
            {"slots": 2, "launcher_environment": {"A": "1"}, "interpreter_options": ("-u",)},
        ),
        (f"mpirun -npernode 3 --host {socket.gethostname()}:3 python train.py", {"slots": 3}),
        ("mpiexec -genv A 1 -genv B 2 -ppn 2 python train.py", {"launcher_environment": {"A": "1", "B": "2"}}),
        ("mpirun -np 1 torchrun --nproc_per_node 2 train.py", {"slots": 2, "launched_by": "torchrun"}),
    ],
)
def test_mpirun_is_left_out(command: str, fields: dict[str, Any]) -> None:
    entrypoint = typed(command)
    assert {name: getattr(entrypoint, name) for name in fields} == fields
    assert any("mpirun is left out: " in note for note in entrypoint.notes)


@pytest.mark.parametrize(
    ("command", "slots"),
    [
        ("srun -n 8 python train.py", 8),
        ("srun -n8 -N1 --gres=gpu:8 -c 4 --kill-on-bad-exit=1 python train.py", 8),
        ("srun --nodes=1-1 --ntasks-per-node=4 --export=ALL,A=1 -l python train.py", 4),
        ("srun python train.py", 6),
        ("srun -N 1 -n 1 torchrun --nproc_per_node 2 train.py", 2),
    ],
)
def test_srun_is_left_out_within_an_allocation(command: str, slots: int) -> None:
    entrypoint = typed(command, **JOB, SLURM_NTASKS="6")
    assert entrypoint.slots == slots
    assert entrypoint.launcher_environment == ({"A": "1"} if "A=1" in command else {})


@pytest.mark.parametrize(
    ("command", "shell", "said"),
    [
        ("mpirun python train.py", {}, "is not told how many ranks"),
        ("mpirun -np two python train.py", {}, "two ranks"),
        ("mpirun -np 2 --hostfile hosts python train.py", {}, "a search runs on this host"),
        ("mpirun -np 2 -H other:2 python train.py", {}, "names the host other"),
        ("mpirun -np 1 python a.py : -np 1 python b.py", {}, "several programs"),
        ("mpirun -np 2 torchrun train.py", {}, "starts torchrun 2 times"),
        ("mpirun -np 2 --no-such python train.py", {}, "--no-such of the launcher mpirun"),
        ("srun -n 8 python train.py", {}, "on other machines than this one"),
        ("srun -N 2 -n 8 python train.py", JOB, "asks for several nodes"),
        ("srun -n 8 python train.py", {**JOB, "SLURM_JOB_NUM_NODES": "2"}, "the allocation has 2 nodes"),
        ("srun -n 8 --chdir /x python train.py", JOB, "change to that folder"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_what_to_type(command: str, shell: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as refused:
        typed(command, **shell)
    assert said in refused.value.what
    assert refused.value.remedy
