"""The words of a plan's command start the ranks that it is for."""

from pathlib import Path

import pytest

from trial_lib.device.host.base import Host
from trial_lib.foresee.plan.asked_devices import read_devices
from trial_lib.foresee.time.devices import known_devices
from trial_lib.study.opening.typed_command import read_command
from trial_lib.study.planning.open_plan import started_on


@pytest.mark.parametrize(
    ("typed", "on", "words"),
    [
        ("deepspeed --num_gpus 4", "h100-80gb:8", "deepspeed --num_gpus 8"),
        ("deepspeed --num_gpus=4 --no_local_rank", "h100-80gb:8", "deepspeed --num_gpus=8 --no_local_rank"),
        ("torchrun --nproc_per_node 2", "h100-80gb:4", "torchrun --nproc_per_node 4"),
        ("torchrun --nproc-per-node=8", "h100-80gb:8", "torchrun --nproc-per-node=8"),
        # Ranks on several hosts are started on each of them.
        ("torchrun --nproc_per_node 8", "h100-80gb:2x8", "torchrun --nproc_per_node 8"),
        # It starts one rank on each device that it finds.
        ("deepspeed", "h100-80gb:8", "deepspeed"),
    ],
)
def test_the_launcher_starts_as_many_ranks_as_were_asked_for(tmp_path: Path, typed: str, on: str, words: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text("{}")
    command = [*typed.split(), "train.py", "--deepspeed", "ds.json"]
    experiment = read_command(command, {}, tmp_path, Host("cuda", [str(index) for index in range(8)], 2**36))
    (asked,) = read_devices((on,), (), known_devices(None))
    assert " ".join(started_on(experiment, asked).entrypoint.launcher) == f"{words} train.py"
