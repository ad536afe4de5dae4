"""Checkpoints of trainings in which ranks turn switches of the model: the plain program's, in both directions."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PROGRAMS
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from server_fixtures import free_port

from zerotune.trial_lib.messages.orders import TrainingOrder

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.devices(2), pytest.mark.timeout(900)]

FOLDER = PROGRAMS / "turned"
CHECKPOINTING, COMPILE = "model:activation_checkpointing", "model:compile"
BY_RANK = (
    "import json, sys; from zerotune.trial_lib.rank.rank import train; train(json.loads(sys.argv[1]), int(sys.argv[2]))"
)
LOSS = re.compile(r"^step (\d+) loss ([\d.]+)$", re.MULTILINE)
NAMES = {
    *("words.weight", "head.weight"),
    *(f"blocks.{number}.{name}" for number in range(4) for name in ("linear.weight", "linear.bias", "scale")),
}


class Runs:
    """Runs the program on two ranks, as it is or with switches turned.

    Args:
        folder: for configuration and logs.
        stage: of ZeRO.
    """

    def __init__(self, folder: Path, stage: int) -> None:
        self._config = folder / "config.json"
        config: dict[str, Any] = json.loads((FOLDER / "ds_config.json").read_text())
        zero = {
            "stage": stage,
            "reduce_bucket_size": 10_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        self._config.write_text(json.dumps({**config, "zero_optimization": zero}))

    def losses(self, *words: str, turned: dict[str, Any] | None = None) -> dict[int, float]:
        """Returns the losses of rank 0 by step."""
        arguments = ["--deepspeed_config", str(self._config), *words]
        port, ranks = str(free_port()), []
        for rank in range(2):
            command = [sys.executable, "saves.py", *arguments]
            if turned:
                order = asdict(self._order(arguments, turned))
                command = [sys.executable, "-c", BY_RANK, json.dumps(order), str(rank)]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            place |= {"LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            out, environment = subprocess.PIPE, {**os.environ, **place}
            ranks.append(
                subprocess.Popen(command, cwd=FOLDER, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
            )
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said[0][-3000:]
        return {int(step): float(loss) for step, loss in LOSS.findall(said[0])}

    def _order(self, arguments: list[str], turned: dict[str, Any]) -> TrainingOrder:
        own = self._config.parent
        return TrainingOrder(
            program={"script": str(FOLDER / "saves.py")},
            local_rank_option="",
            arguments=arguments,
            ds_config={},
            is_in_code=False,
            device=None,
            turned=turned,
            finished=[str(own / f"finished{rank}") for rank in range(2)],
            failures=[str(own / f"failure{rank}") for rank in range(2)],
        )


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("turned", [{CHECKPOINTING: "full"}, {CHECKPOINTING: "every_second", COMPILE: True}])
def test_a_checkpoint_has_the_plain_programs_names_and_resumes_with_the_switches_and_without(
    turned: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    runs = Runs(tmp_path, stage)
    plain, saved = tmp_path / "plain", tmp_path / "turned"
    own = runs.losses("--saves", str(plain))
    assert sorted(own) == [1, 2, 3, 4, 5, 6]
    assert runs.losses("--saves", str(saved), turned=turned) == pytest.approx(own, rel=1e-4)
    rest = pytest.approx({step: own[step] for step in (4, 5, 6)}, rel=1e-4)
    assert runs.losses("--resumes", str(saved)) == rest
    assert runs.losses("--resumes", str(plain), turned=turned) == rest
    for folder in (plain, saved):
        assert set(get_fp32_state_dict_from_zero_checkpoint(folder)) == NAMES
        of_model = "pytorch_model.bin" if stage == 3 else "plain0.pt"
        assert set(torch.load(folder / of_model)) == NAMES
