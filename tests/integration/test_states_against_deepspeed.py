"""The formulas of a model's states against real engines: what each format of master copies and gradients takes."""

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.search.allocations import allocations
from zerotune.trial_lib.search.zero_settings import ZeroSettings

WIDTH, LAYERS = 300, 40
NUM_PARAMS = LAYERS * WIDTH * WIDTH
LOW = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SUMS_IN_32_BITS = {"grad_accum_dtype": "fp32"}

# Each engine lives in a child, because DeepSpeed keeps references to a model. The first of two steps makes the states.
# All tensors are read from Python's garbage collector, each storage once.
PROGRAM = """
import gc, json, os, sys
import deepspeed, torch
from zerotune.trial_lib.launch.processes.fork_server import compiled_when_called
from zerotune.trial_lib.launch.processes.fork_server import remember_cpu_info

remember_cpu_info()
with compiled_when_called():
    import deepspeed.runtime.zero.muon.original_muon
width, layers = int(sys.argv[1]), int(sys.argv[2])

def held():
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())

def train(config):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch = torch.ones(1, width, dtype=next(model.parameters()).dtype)
    initialized = held()
    for _ in range(2):
        engine.backward(engine(batch).float().pow(2).mean())
        # The backward pass of the second step has gradients beside the states.
        after_backward = held()
        engine.step()
    return initialized, after_backward

# It imports Dynamo, once for all children.
torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
# What is there already is no engine's.
gc.freeze()
for config in json.load(sys.stdin):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print("held", *train(config), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def config_of(stage: int, bf16: dict[str, Any] | None, data_types: dict[str, str]) -> dict[str, Any]:
    # Small buckets, so that the states are all that counts.
    small = {"reduce_bucket_size": WIDTH, "allgather_bucket_size": WIDTH, "stage3_prefetch_bucket_size": WIDTH}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {**small, "stage": stage, "contiguous_gradients": False},
        **({} if bf16 is None else {"bf16": {"enabled": True, **bf16}}),
        **({"data_types": data_types} if data_types else {}),
    }


CASES = [config_of(stage, None, {}) for stage in (1, 2, 3)] + [
    config_of(stage, bf16, sums) for stage, bf16, sums in itertools.product((1, 2, 3), ({}, LOW), ({}, SUMS_IN_32_BITS))
]


@pytest.fixture(scope="module")
def measured() -> list[tuple[float, float]]:
    """Bytes that each engine holds for a parameter: initialised, and after the backward pass of its second step."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(WIDTH), str(LAYERS)],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("held")]
    assert len(lines) == len(CASES), ended.stderr[-2000:]
    return [(int(at_first) / NUM_PARAMS, int(later) / NUM_PARAMS) for _, at_first, later in lines]


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_states_of_each_format_take_what_the_formulas_say(measured: list[tuple[float, float]], number: int) -> None:
    config = CASES[number]
    profile = ModelProfile(
        num_params=NUM_PARAMS,
        trainable_num_params=NUM_PARAMS,
        activation_mem_per_gpu=0,
        gpu_mem=2**40,
        data_parallel_size=1,
        flops_per_sample=1.0,
    )
    settings = ZeroSettings.of(config)
    foreseen = allocations(settings, settings, profile, 1, "cpu", 1)
    for held, expected in zip(measured[number], (foreseen.initialize, foreseen.all_states), strict=True):
        # The parameter or the gradient of one layer may still be referred to.
        assert -0.05 < held - expected / NUM_PARAMS < 4 / LAYERS + 0.05, config
