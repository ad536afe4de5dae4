"""The words of a plan's command start the ranks that it is for."""

from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.plan.devices import known_devices, read_devices
from zerotune.trial_lib.study.typed_command import read_command, started_on


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
    host = Host("cuda", [str(index) for index in range(8)], 2**36)
    assert started(tmp_path, typed, on, host) == f"{words} train.py"


@pytest.mark.parametrize(
    "typed",
    [
        "accelerate launch --use_deepspeed --num_processes 2 --gpu_ids 0,1",
        "env CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 2",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2",
        "deepspeed --include localhost:0,1",
        "deepspeed --exclude localhost:0",
    ],
)
def test_a_command_that_chooses_devices_stays_as_typed(tmp_path: Path, typed: str) -> None:
    before = started(tmp_path, typed, "h100-80gb:2", None)
    assert before == started(tmp_path, typed, "h100-80gb:8", None)
    assert typed.removeprefix("env ").removeprefix("CUDA_VISIBLE_DEVICES=0,1 ") in before


def started(folder: Path, typed: str, on: str, host: Host | None) -> str:
    """The launcher's words that start a plan."""
    (folder / "train.py").touch()
    (folder / "ds.json").write_text("{}")
    command = [*typed.split(), "train.py", "--deepspeed", "ds.json"]
    experiment = read_command(command, {}, folder, host)
    (asked,) = read_devices((on,), (), known_devices(None))
    return " ".join(started_on(experiment, asked.count, asked.cluster.hosts).entrypoint.launcher)
