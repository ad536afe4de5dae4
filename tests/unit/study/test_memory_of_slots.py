"""What a rank may use of its slot's memory."""

from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.setup import StudySetup

CONFIG = """
name: t
entrypoint: deepspeed train.py
hyperparameters: {deepspeed_config: {train_micro_batch_size_per_gpu: 2}}
max_restarts: 0
"""
GIB = 2**30


def limit_on(device: str, folder: Path, resources: str = "") -> int | None:
    """Returns the bytes that a rank is held to on a host whose slots have 80 GiB."""
    (folder / "train.py").write_text("")
    config = folder / "experiment.yaml"
    config.write_text(CONFIG + resources)
    experiment = read_experiment(config, folder)
    arguments = StudyArguments(config_path=config, model_dir=folder)
    host = Host(device, ["0"], 80 * GIB)
    return StudySetup.now("s", 0.0, experiment, arguments, StudyPaths(folder), host).memory_limit


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_user_grants_bounds_every_kind_of_slot(device: str, tmp_path: Path) -> None:
    assert limit_on(device, tmp_path, "resources: {memory_per_slot: 40 GiB}") == 40 * GIB


def test_a_gpu_has_its_own_memory_and_a_core_its_share_of_the_hosts(tmp_path: Path) -> None:
    assert limit_on("cuda", tmp_path) is None
    assert limit_on("cpu", tmp_path) == 80 * GIB
