"""The example under the `deepspeed` launcher, as a user runs it: real ranks, on the CPU."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_fixtures import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "hello_deepspeed"
pytestmark = [pytest.mark.alone, pytest.mark.devices(2)]

LAUNCHER = Path(sys.executable).parent / "deepspeed"
SMALL = ["--layers", "1", "--hidden", "32", "--log_every", "1"]


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
    }
    launched = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = launched.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)  # the launcher's ranks would outlive it
    for left_behind in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):  # 69 MB a rank
        left_behind.unlink()
    assert launched.returncode == 0, output
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", output, re.MULTILINE)}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of 40 steps in one go."""
    return train("--num_steps", "40", "--checkpoint_dir", str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.long
def test_the_loss_falls(losses: dict[int, float]) -> None:
    assert list(losses) == list(range(1, 41))
    assert sum(losses[step] for step in range(36, 41)) / 5 < losses[1] - 1


@pytest.mark.long
def test_a_resumed_training_repeats_the_losses_of_one_that_never_stopped(
    losses: dict[int, float], tmp_path: Path
) -> None:
    before = train("--num_steps", "25", "--checkpoint_dir", str(tmp_path))
    after = train("--num_steps", "40", "--checkpoint_dir", str(tmp_path), "--resume")
    assert list(after) == list(range(26, 41))
    assert {**before, **after} == losses
