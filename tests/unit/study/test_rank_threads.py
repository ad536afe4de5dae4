"""How many OpenMP threads a rank has, and the training after it: as many as the user's launcher gives it."""

import sys
from pathlib import Path

import pytest
from study_setups import setup_of

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.study.typed_command import read_command

SLOTS = ["0", "1", "2", "3"]


def threads(folder: Path, command: str, device: str) -> tuple[str | None, str]:
    """Returns OMP_NUM_THREADS as the ranks have it, and the command to train with."""
    experiment = read_command(command.split(), {}, folder, Host(device, SLOTS, 2**30))
    setup = setup_of(experiment, folder / "study", device)
    told = training_command(setup, KnownProgram.of(experiment), {})
    return setup.environment.get("OMP_NUM_THREADS"), told


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "device", "number"),
    [
        ("deepspeed --num_gpus 4 train.py", "cuda", None),
        ("python train.py", "cuda", None),
        ("torchrun --nproc_per_node 1 train.py", "cuda", None),
        ("torchrun --nproc_per_node 4 train.py", "cuda", "1"),
        # Each has a core.
        ("deepspeed --num_gpus 4 train.py", "cpu", "1"),
        ("python train.py", "cpu", "1"),
    ],
)
def test_ranks_on_gpus_have_as_many_threads_as_their_launcher_leaves_them(
    folder: Path, command: str, device: str, number: str | None
) -> None:
    found, told = threads(folder, command, device)
    assert found == number
    assert ("OMP_NUM_THREADS=1 " in told) == (number == "1")


@pytest.mark.parametrize("command", ["deepspeed train.py", "torchrun --nproc_per_node 4 train.py"])
def test_a_number_that_the_user_sets_stays(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = threads(folder, f"OMP_NUM_THREADS=6 {command}", "cuda")
    assert found == "6"
    assert "OMP_NUM_THREADS=6 " in told
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found, told = threads(folder, command, "cuda")
    assert found == "5"
    # It is in the user's shell already.
    assert "OMP_NUM_THREADS" not in told
