"""The example under the `deepspeed` launcher, as a user runs it: real ranks, on the CPU."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "hello_deepspeed"
LAUNCHER = Path(sys.executable).parent / "deepspeed"
SMALL = ["--layers", "1", "--hidden", "32", "--log_every", "1"]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def train(*arguments: str) -> dict[int, float]:
    """Runs the example on two ranks and returns the loss of each step, as it was printed."""
    port = free_port()
    command = [LAUNCHER, "--num_accelerators", "2", "--master_port", str(port)]
    command += [EXAMPLE / "train.py", "--deepspeed_config", EXAMPLE / "ds_config.json", *SMALL, *arguments]
    path = f"{LAUNCHER.parent}{os.pathsep}{os.environ['PATH']}"
    # MKL's default kernels round differently with a tensor's place in memory, which is another one after a resume.
    environment = {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "COMPATIBLE",
        "DS_ACCELERATOR": "cpu",
    }
    run = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    for left_behind in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):  # 69 MB a rank
        left_behind.unlink()
    assert run.returncode == 0, run.stdout + run.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", run.stdout, re.MULTILINE)}


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def losses(checkpoint_dir: Path) -> dict[int, float]:
    """Of 40 steps in one go, which leave a checkpoint of step 30 behind."""
    return train("--num_steps", "40", "--checkpoint_dir", str(checkpoint_dir), "--save_every", "30")


def test_the_loss_falls(losses: dict[int, float]) -> None:
    assert list(losses) == list(range(1, 41))
    assert sum(losses[step] for step in range(36, 41)) / 5 < losses[1] - 1


def test_a_resumed_training_repeats_the_losses_of_one_that_never_stopped(
    losses: dict[int, float], checkpoint_dir: Path
) -> None:
    resumed = train("--num_steps", "40", "--checkpoint_dir", str(checkpoint_dir), "--resume")
    assert resumed == {step: losses[step] for step in range(31, 41)}
