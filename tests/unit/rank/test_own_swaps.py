"""DeepSpeed swaps a trial's parameters and states into a folder of the trial's own, wherever they are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.trial_lib.messages import folders

# As DeepSpeed reads them: the engine's configuration, zero.Init's, and one that was read before.
RANK = """
import json, sys
from pathlib import Path
sys.modules["mlflow"] = None
from zerotune.trial_lib.rank.redirects import swap_into_own_folder
swap_into_own_folder(Path({scratch!r}))
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

sections = {{
    "offload_param": {{"device": "nvme", "nvme_path": {nvme!r}, "buffer_count": 7}},
    "offload_optimizer": {{"device": "nvme", "nvme_path": {nvme!r}, "pipeline_read": True}},
}}
user = {{"train_batch_size": 1, "zero_optimization": {{"stage": 3, **sections}}}}
zero = DeepSpeedConfig(user).zero_config
again = DeepSpeedZeroConfig(**zero.model_dump(exclude_unset=True))
on_cpu = DeepSpeedZeroOffloadOptimizerConfig(device="cpu", nvme_path={nvme!r})
found = [each.nvme_path for each in (zero.offload_param, zero.offload_optimizer, again.offload_param, on_cpu)]
said = [*map(str, found), zero.offload_param.buffer_count, zero.offload_optimizer.pipeline]
print("said", json.dumps([said, user["zero_optimization"]["offload_param"]["nvme_path"]]))
"""


@pytest.mark.long
def test_parameters_and_states_go_below_the_folder_that_is_named_and_the_configuration_stays(tmp_path: Path) -> None:
    scratch, nvme = tmp_path / "scratch", tmp_path / "nvme"
    scratch.mkdir()
    program = RANK.format(scratch=str(scratch), nvme=str(nvme))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("said ")]
    said, of_the_user = json.loads(line.removeprefix("said "))
    own = str(folders.own_folder(nvme, scratch))
    assert own.startswith(f"{nvme}/zerotune-")
    assert said == [own, own, own, str(nvme), 7, True]
    assert of_the_user == str(nvme)
    # So that it is removed.
    Path(own, "zero_stage_3").mkdir(parents=True)
    folders.remove(scratch)
    assert list(nvme.iterdir()) == []


@pytest.mark.long
def test_ranks_that_swap_nothing_need_no_such_path(tmp_path: Path) -> None:
    program = RANK.format(scratch=str(tmp_path), nvme="/no such path").replace(
        "'))", f"'), Path({str(tmp_path)!r}))", 1
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    own = str(folders.own_folder(tmp_path, tmp_path))
    assert f"[{json.dumps(own)}, {json.dumps(own)}" in ended.stdout


def test_two_trials_have_two_folders_and_one_has_the_same_on_every_host(tmp_path: Path) -> None:
    first, second = (folders.own_folder(Path("/nvme"), tmp_path / name) for name in ("0001", "0002"))
    assert first != second
    assert first == folders.own_folder(first, tmp_path / "0001")
