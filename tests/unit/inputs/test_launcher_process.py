"""Which processes are launchers, told by their words."""

import pytest

from zerotune.trial_lib.inputs.launchers import launcher_in, python_target

BIN = "/opt/env/bin"


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (f"{BIN}/python {BIN}/torchrun --nproc_per_node 2 train.py", f"{BIN}/torchrun --nproc_per_node 2 train.py"),
        (f"{BIN}/python3.11 -u -W ignore {BIN}/deepspeed train.py", f"{BIN}/deepspeed train.py"),
        (f"{BIN}/python {BIN}/accelerate launch train.py", f"{BIN}/accelerate launch train.py"),
        (f"{BIN}/python {BIN}/accelerate-launch train.py", f"{BIN}/accelerate-launch train.py"),
        ("python -m torch.distributed.run train.py", "python -m torch.distributed.run train.py"),
        ("python -X dev -m deepspeed.launcher.runner train.py", "python -m deepspeed.launcher.runner train.py"),
        ("python -m torch.distributed.launch train.py", "python -m torch.distributed.launch train.py"),
        (
            "python -u -m deepspeed.launcher.launch --world_info=eyJsb2NhbGhvc3QiOiBbMCwgMV19 --master_port=4 t.py --x",
            "python -m deepspeed.launcher.runner --num_gpus 2 --master_port 4 t.py --x",
        ),
        ("python -m accelerate.commands.launch train.py", "python -m accelerate.commands.launch train.py"),
        (
            "python -m accelerate.commands.accelerate_cli launch train.py",
            "python -m accelerate.commands.launch train.py",
        ),
        ("/usr/bin/mpirun -np 2 python train.py", "/usr/bin/mpirun -np 2 python train.py"),
        ("srun -n 2 python train.py", "srun -n 2 python train.py"),
        ("deepspeed train.py -V", "deepspeed train.py -V"),
    ],
)
def test_a_launcher_is_known_by_its_words(words: str, launcher: str) -> None:
    assert launcher_in(words.split()) == launcher.split()


@pytest.mark.parametrize(
    "words",
    [
        "",
        "bash -c torchrun",
        "python train.py torchrun",
        f"{BIN}/python {BIN}/accelerate config",
        "python -m accelerate.commands.accelerate_cli env",
        "python -c torchrun",
        "python",
        "vim torchrun",
        "mpirun --version",
        f"{BIN}/python {BIN}/torchrun --help",
        "python -m torch.distributed.run -h",
        "accelerate launch --help",
    ],
)
def test_another_process_is_none(words: str) -> None:
    assert launcher_in(words.split()) is None


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("python -u -X dev train.py --x", "train.py"),
        ("python3.12 -m pkg.train", "pkg.train"),
        ("python -c pass", None),
        ("python", None),
        ("bash run.sh", None),
    ],
)
def test_the_script_or_the_module_of_a_python_is_found(words: str, target: str | None) -> None:
    position = python_target(words.split())
    assert (None if position is None else words.split()[position]) == target
