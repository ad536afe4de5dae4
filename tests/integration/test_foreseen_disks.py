"""States on NVMe drives, in a foreseen run: what is read and written, as a real engine does, and no disk is touched."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from case_fixtures import quick_first
from foreseen_fixtures import program_named

from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun
from zerotune.trial_lib.plan.simulation import Pretended, simulate

# DeepSpeed swaps no tensor below 1 MiB.
LAYERS, WIDTH = 6, 1024
# A foreseen run ends with its second.
STEPS = 2
TRAINING = f"""
import deepspeed, torch
from torch import nn
model = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})])
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
for _ in range(STEPS):
    loss = engine(torch.randn(2, {WIDTH}, dtype=torch.bfloat16, device=engine.device)).float().square().mean()
    engine.backward(loss)
    engine.step()
"""
# DeepSpeed's own op needs libaio, which few hosts have. This one moves the same files by numpy.
BY_NUMPY = """
import json
import numpy as np
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

SUMS, LOCKED = {"from_disk": 0, "to_disk": 0}, set()

class Handle:
    def __init__(self, **settings):
        self.begun = 0
    def async_pread(self, buffer, path, offset):
        read = np.fromfile(path, dtype=np.uint8)
        buffer.detach().view(torch.uint8).numpy()[:] = read[: buffer.numel() * buffer.element_size()]
        return self.moved("from_disk", buffer)
    def async_pwrite(self, buffer, path, offset):
        buffer.detach().view(torch.uint8).numpy().tofile(path)
        return self.moved("to_disk", buffer)
    def moved(self, kind, buffer):
        SUMS[kind] += buffer.numel() * buffer.element_size()
        self.begun += 1
        return 0
    def wait(self):
        done, self.begun = self.begun, 0
        return done
    def new_cpu_locked_tensor(self, numbers, example):
        made = torch.empty(numbers, dtype=example.dtype)
        LOCKED.add(made.untyped_storage().data_ptr())
        return made
    def free_cpu_locked_tensor(self, tensor):
        return True
    def is_pinned(self, tensor):
        return tensor.untyped_storage().data_ptr() in LOCKED

class Op:
    aio_handle = Handle

load = OpBuilder.load
OpBuilder.load = lambda self, verbose=True: Op() if self.NAME == "async_io" else load(self, verbose)
"""
ENDS = "\nprint('SUMS', json.dumps(SUMS))\n"
NOWHERE = "/no such path"
KEEPS_NONE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def config(folder: str, *, buffers: int = 5, keeps: bool = True, **states: dict[str, Any]) -> dict[str, Any]:
    """A configuration with states on NVMe.

    Args:
        folder: of the drive.
        buffers: for parameters.
        keeps: whether DeepSpeed may keep parameters that it needs again.
        **states: `offload_optimizer` or `offload_param`, each with its settings.
    """
    named = {"device": "nvme", "nvme_path": folder, "buffer_count": buffers}
    offloaded = {name: {**named, **settings} for name, settings in states.items()}
    zero = {"sub_group_size": 2 * WIDTH**2, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero, **({} if keeps else KEEPS_NONE), **offloaded},
    }


def foreseen(starter: WarmStarter, folder: Path, written: dict[str, Any], world: int = 1) -> ForeseenRun:
    (folder / "train.py").write_text(f"STEPS = 100\n{TRAINING}")
    (folder / "ds_config.json").write_text(json.dumps(written))
    pretended = Pretended(world=world, ranks_per_host=world)
    return simulate(program_named("train.py", folder=folder), {}, pretended, folder / "run", starter, deadline_s=120.0)


def moved(run: ForeseenRun, kind: str, *moments: str) -> float:
    """Bytes that the last step reads from a disk or writes to it, in these moments or all."""
    last = max(each.step for each in run.moments if MOMENTS[each.name] == "update")
    return sum(
        one.moved
        for each, stretch in run.operations_by_moment()
        if each.step == last and (not moments or MOMENTS[each.name] in moments)
        for one in stretch
        if OPERATIONS[one.kind] == kind
    )


@pytest.mark.long
@pytest.mark.parametrize("pipelined", quick_first(1, [False, True]))
def test_an_update_reads_and_writes_gradients_master_copies_and_both_moments(
    foreseeing_starter: WarmStarter, tmp_path: Path, pipelined: bool
) -> None:
    settings = {"pipeline_read": pipelined, "pipeline_write": pipelined}
    written = config(NOWHERE, buffers=8, offload_optimizer=settings)
    run = foreseen(foreseeing_starter, tmp_path, written, world=2)
    assert run.stopped == ""
    share = LAYERS * WIDTH**2 / 2
    assert moved(run, "from_disk", "update") == moved(run, "to_disk", "backward", "update") == 16 * share


def test_parameters_are_read_for_both_passes_and_written_after_the_update(
    foreseeing_starter: WarmStarter, tmp_path: Path
) -> None:
    run = foreseen(foreseeing_starter, tmp_path, config(NOWHERE, keeps=False, offload_param={"max_in_cpu": 0}))
    assert run.stopped == ""
    all_bytes = 2 * LAYERS * WIDTH**2
    assert moved(run, "from_disk", "forward") == moved(run, "from_disk", "backward") == all_bytes
    assert moved(run, "to_disk", "update") == moved(run, "to_disk") == all_bytes


CASES: dict[str, dict[str, Any]] = {
    "the optimizer": {"buffers": 8, "offload_optimizer": {}},
    "parameters": {"keeps": False, "offload_param": {"max_in_cpu": 0}},
    "both": {"keeps": False, "buffers": 8, "offload_optimizer": {}, "offload_param": {"max_in_cpu": 0}},
    "parameters that it keeps": {"offload_param": {"max_in_cpu": 0}},
}


# An engine that offloads builds an op that nothing else needs, which takes a minute.
@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_real_engine_moves_as_many_bytes_or_ends_with_the_same_error(
    foreseeing_starter: WarmStarter, tmp_path: Path, case: str
) -> None:
    run = foreseen(foreseeing_starter, tmp_path, config(NOWHERE, **CASES[case]))
    real = tmp_path / "real"
    real.mkdir()
    (real / "train.py").write_text(f"STEPS = {STEPS}\n{BY_NUMPY}{TRAINING}{ENDS}")
    (real / "ds_config.json").write_text(json.dumps(config(str(real / "nvme"), **CASES[case])))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "train.py"], cwd=real, env={**os.environ, **rank}, capture_output=True, text=True, check=False
    )
    assert not Path(NOWHERE).exists()
    if case == "parameters that it keeps":
        assert "AssertionError: Not enough buffers" in ended.stderr
        assert "`stage3_max_live_parameters: 0`" in run.stopped
        return
    assert ended.returncode == 0, ended.stderr
    (line,) = [each for each in ended.stdout.splitlines() if each.startswith("SUMS")]
    sums = json.loads(line.removeprefix("SUMS"))
    assert sums == {kind: sum(one.moved for one in run.operations if OPERATIONS[one.kind] == kind) for kind in sums}
