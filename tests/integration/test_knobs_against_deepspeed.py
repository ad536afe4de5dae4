"""The catalogue against real DeepSpeed engines, on two CPU ranks: a knob has an effect where it says, and nowhere else.

What an engine does is what it communicates, step by step, and what it holds. Two values of a knob with an effect leave
two different engines; without one they leave the same. What takes an accelerator is seen here to have none on a CPU.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.layout import AUTOEP
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.search.arms import RequestedKnob, without_effect
from zerotune.trial_lib.search.catalogue import KNOBS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, TORCH_ADAM
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE, ZERO_STAGES, set_knob

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900)]

RANKS = 2
LAYERS, WIDTH = 6, 32
NUM_PARAMS = LAYERS * (WIDTH * WIDTH + WIDTH)
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": ADAM,
    # So that stage 3 has something to gather.
    "zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2 * NUM_PARAMS},
}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
PARAMS_OFFLOADED = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
BF16 = {"bf16": {"enabled": True}}
MASTER, STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


@dataclass(frozen=True)
class Pair:
    """Two values of one knob, to be compared at each stage with the rest of the configuration the same."""

    path: str
    values: tuple[Any, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ZERO_STAGES

    def base(self) -> dict[str, Any]:
        return overwrite_deepspeed_config(BASE, self.beside)

    def configs(self, stage: int) -> list[dict[str, Any]]:
        configs = []
        for value in self.values:
            config = overwrite_deepspeed_config(self.base(), {"zero_optimization": {"stage": stage}})
            set_knob(config, self.path, value)
            configs.append(config)
        return configs


ZERO = "zero_optimization"
SWITCH = (False, True)
PAIRS = (
    Pair(OFFLOAD_OPTIMIZER, ("none", "cpu")),
    Pair(OFFLOAD_PARAM, ("none", "cpu")),
    Pair(f"{ZERO}.offload_optimizer.pin_memory", SWITCH, OFFLOADED),
    Pair(f"{ZERO}.offload_param.pin_memory", SWITCH, PARAMS_OFFLOADED),
    Pair(f"{ZERO}.reduce_bucket_size", (2 * NUM_PARAMS, 2000)),
    Pair(f"{ZERO}.allgather_bucket_size", (2 * NUM_PARAMS, 2000)),
    Pair(f"{ZERO}.overlap_comm", SWITCH),
    Pair(f"{ZERO}.reduce_scatter", SWITCH),
    Pair(f"{ZERO}.reduce_scatter", SWITCH, {ZERO: {"use_multi_rank_bucket_allreduce": False}}),
    Pair(f"{ZERO}.contiguous_gradients", SWITCH),
    Pair(f"{ZERO}.contiguous_gradients", SWITCH, OFFLOADED),
    Pair(f"{ZERO}.round_robin_gradients", SWITCH),
    Pair(f"{ZERO}.round_robin_gradients", SWITCH, OFFLOADED),
    Pair(f"{ZERO}.stage3_prefetch_bucket_size", (0, 5000)),
    Pair(f"{ZERO}.stage3_param_persistence_threshold", (0, 100)),
    Pair(f"{ZERO}.stage3_max_live_parameters", (1, NUM_PARAMS)),
    Pair(f"{ZERO}.sub_group_size", (10**9, 600)),
    # Above stage 2 a CPU refuses them, see `rules`.
    Pair(f"{ZERO}.zero_quantized_weights", SWITCH, stages=(0, 1, 2)),
    Pair(f"{ZERO}.zero_quantized_nontrainable_weights", SWITCH, stages=(0, 1, 2)),
    Pair(f"{ZERO}.zero_quantized_gradients", SWITCH),
    Pair("bf16.enabled", SWITCH),
    Pair("torch_autocast.enabled", SWITCH),
    Pair("communication_data_type", ("fp32", "bf16")),
    Pair("communication_data_type", ("fp32", "bf16"), AUTOCAST, stages=(1, 2, 3)),
    Pair(f"{ZERO}.zero_hpz_partition_size", (1, 2)),
    Pair(f"{ZERO}.offload_optimizer.pipeline_read", SWITCH, OFFLOADED),
    Pair(f"{ZERO}.offload_optimizer.pipeline_write", SWITCH, OFFLOADED),
    Pair(f"{ZERO}.offload_optimizer.super_offload", SWITCH, OFFLOADED, stages=(0, 1, 2)),
    Pair(f"{ZERO}.offload_optimizer.cpuadam_cores_perc", (0.8, 0.5), OFFLOADED),
    Pair(f"{ZERO}.stage3_module_granularity_threshold", (0, 10**6)),
    Pair(f"{ZERO}.leaf_module.classes", ([], ["Block"])),
    Pair(f"{ZERO}.leaf_module.names", ([], ["1"])),
    Pair(f"{ZERO}.leaf_module.name_suffixes", ([], ["1"])),
    # Stage 0 refuses it, see `rules`.
    Pair("data_types.grad_accum_dtype", ("fp32", "bf16"), BF16, stages=(1, 2, 3)),
    Pair("disable_python_gc", SWITCH),
    Pair(TORCH_ADAM, SWITCH),
    Pair(TORCH_ADAM, SWITCH, OFFLOADED, stages=(1, 2, 3)),
    Pair("optimizer.params.fused", SWITCH),
    *(Pair(path, SWITCH) for path in KNOBS if path.startswith("compile.")),
)
CASES = [(pair, stage) for pair in PAIRS for stage in pair.stages]
OWN_OPTIMIZER = {
    **{key: value for key, value in BASE.items() if key != "optimizer"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


# The code's own is SGD where this is said, and AdamW where not.
PERMITTED, NOT_PERMITTED = (
    {**OWN_OPTIMIZER, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": permitted}
    for permitted in (True, False)
)


def of_16_bits() -> list[list[dict[str, Any]]]:
    """Returns configurations with bf16 and, for each, the one whose states have 16 bits as well."""
    at_stages = [overwrite_deepspeed_config(BASE, {ZERO: {"stage": stage}}) for stage in (1, 2, 3)]
    both = (BF16, BF16_STATES)
    return [[overwrite_deepspeed_config(config, each) for each in both] for config in at_stages]


def every_config() -> list[dict[str, Any]]:
    told = {**OWN_OPTIMIZER, "zero_force_ds_cpu_optimizer": False}
    own = [OWN_OPTIMIZER, told, PERMITTED, NOT_PERMITTED, *(config for pair in of_16_bits() for config in pair)]
    configs = [*(config for pair, stage in CASES for config in pair.configs(stage)), *own]
    return [config for index, config in enumerate(configs) if config not in configs[:index]]


@pytest.fixture(scope="module")
def deepspeed_did(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = tmp_path_factory.mktemp("deepspeed") / "answers.json"
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        place["LOCAL_SIZE"] = str(RANKS)  # a CPU rank is a device of its own: else each NUMA node is one
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        with (answers.parent / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, __file__, str(answers)]
            environment = {**os.environ, **place, "CUDA_VISIBLE_DEVICES": ""}
            ranks.append(subprocess.Popen(command, env=environment, cwd=answers.parent, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=840) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * RANKS, (answers.parent / "rank0.log").read_text()[-3000:]
    return json.loads(answers.read_text())


def did(deepspeed_did: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    return deepspeed_did[every_config().index(config)]


def has_effect(pair: Pair, stage: int) -> bool:
    """Returns what the catalogue says."""
    here = Surroundings("cpu", RANKS, RANKS, NUM_PARAMS, NUM_PARAMS, pair.base())
    return not without_effect((stage,), here, [RequestedKnob(pair.path, pair.values)], catalogue=False)


@pytest.mark.parametrize(
    ("pair", "stage"), CASES, ids=[f"{pair.path}-{stage}-{'-'.join(pair.beside)}" for pair, stage in CASES]
)
def test_a_knob_has_an_effect_where_the_catalogue_says(
    pair: Pair, stage: int, deepspeed_did: list[dict[str, Any]]
) -> None:
    one, other = (did(deepspeed_did, config) for config in pair.configs(stage))
    assert "error" not in one, one
    assert "error" not in other, other
    assert (one != other) == has_effect(pair, stage), {key: (one[key], other[key]) for key in one}


def test_every_knob_that_an_engine_reads_is_compared() -> None:
    # Activation checkpointing is read by the user's code, not the engine. ZenFlow and a ratio of offload are refused
    # without DeepSpeed's own Adam. Of states and weights of 16 bits each is refused without the other. Tensor
    # parallelism takes a Transformer (`test_tensor_parallel.py`), and AutoEP one with experts.
    of_zero = (f"{ZERO}.zenflow.", f"{ZERO}.offload_optimizer.ratio")
    apart = ("tensor_parallel.", AUTOEP, "activation_checkpointing.", *of_zero, MASTER, STATES)
    assert {pair.path for pair in PAIRS} == {path for path in KNOBS if not path.startswith(apart)}
    assert STAGE not in KNOBS


def test_states_of_16_bits_are_kept_at_every_stage_of_zero(deepspeed_did: list[dict[str, Any]]) -> None:
    for wide, narrow in of_16_bits():
        kept = [did(deepspeed_did, config) for config in (wide, narrow)]
        assert [each.get("states", each) for each in kept] == [["torch.float32"], ["torch.bfloat16"]]


def test_an_optimizer_of_the_codes_own_is_offloaded_only_when_deepspeed_is_told(
    deepspeed_did: list[dict[str, Any]],
) -> None:
    assert "ZeRO-Offload with a client provided optimizer" in did(deepspeed_did, OWN_OPTIMIZER)["error"]
    assert "error" not in did(deepspeed_did, {**OWN_OPTIMIZER, "zero_force_ds_cpu_optimizer": False})


def test_an_sgd_of_the_codes_own_is_taken_under_zero_only_when_deepspeed_is_told(
    deepspeed_did: list[dict[str, Any]],
) -> None:
    assert "untested ZeRO Optimizer" in did(deepspeed_did, NOT_PERMITTED)["error"]
    assert "error" not in did(deepspeed_did, PERMITTED)


# What follows runs in the ranks.


def ask_deepspeed(answers: Path) -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    said = [watch(config) for config in every_config()]
    if os.environ["RANK"] == "0":
        answers.write_text(json.dumps(said))
    deepspeed.comm.barrier()


COLLECTIVES = (
    *("all_reduce", "inference_all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor"),
    *("all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)


def watch(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what three steps with a configuration communicate, and what the engine holds meanwhile."""
    import deepspeed
    import torch
    from deepspeed.comm import comm

    class Block(torch.nn.Sequential):
        """DeepSpeed takes no container of torch's own for a module that it could gather whole."""

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(layers[0], Block(*layers[1:3]), *layers[3:])
    of_code = torch.optim.SGD if "zero_allow_untested_optimizer" in config else torch.optim.AdamW
    own = None if "optimizer" in config else of_code(model.parameters())
    sent: list[Any] = []
    held: set[int] = set()
    originals = {name: getattr(comm.cdb, name) for name in COLLECTIVES if hasattr(comm.cdb, name)}
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), optimizer=own, config=json.loads(json.dumps(config))
        )
        for name, original in originals.items():
            setattr(comm.cdb, name, recorded(name, original, sent))
        count_buffers(engine.optimizer, held)
        kind, kept = set(), set()
        for _ in range(3):
            sent.append("step")
            batch = torch.ones(2, WIDTH, dtype=next(engine.module.parameters()).dtype)
            output = engine(batch)
            kind.add(str(output.dtype))
            engine.backward(output.float().pow(2).mean())
            kept |= kept_gradients(engine.optimizer)
            engine.step()
    except Exception as error:  # noqa: BLE001 whatever DeepSpeed says is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for name, original in originals.items():
            setattr(comm.cdb, name, original)
        forget()
    did = {
        "sent": sent,
        "computed": sorted(kind),
        "gradients": sorted(kept),
        "buffers": sorted(held),
        **holdings(engine),
    }
    engine.destroy()
    return did


def recorded(name: str, original: Any, sent: list[Any]) -> Any:
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        sent.append([name, *([tensor.numel(), str(tensor.dtype)] for tensor in tensors)])
        return original(*args, **kwargs)

    return call


def kept_gradients(optimizer: Any) -> set[str]:
    """Returns the number formats of the gradients that an optimizer of ZeRO keeps for its step."""
    of_1_and_2 = [each for group in getattr(optimizer, "averaged_gradients", {}).values() for each in group or []]
    of_3 = getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).values()
    return {str(gradient.dtype) for gradient in (*of_1_and_2, *of_3) if gradient is not None}


def count_buffers(optimizer: Any, held: set[int]) -> None:
    """Notes the elements of all buckets of stages 1 and 2, whenever they are made."""
    original = getattr(optimizer, "setup_buckets", None)
    if original is None:
        return

    def setup_buckets() -> None:
        original()
        held.add(sum(buffer.numel() for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer))

    optimizer.setup_buckets = setup_buckets


def holdings(engine: Any) -> dict[str, Any]:
    import gc

    import torch
    from deepspeed.utils import z3_leaf_module

    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    names = {id(parameter): index for index, parameter in enumerate(parameters)}
    states = [value for state in getattr(optimizer, "optimizer", optimizer).state.values() for value in state.values()]
    buckets = [getattr(bucket, "buffer", None) for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    basic = engine.basic_optimizer
    return {
        "updates": [type(basic).__name__, bool(basic.defaults.get("fused"))],
        "device": str(getattr(optimizer, "device", "")),
        "offloads": [bool(getattr(optimizer, key, False)) for key in ("cpu_offload", "offload_optimizer")],
        "buckets": [buffer.numel() for buffer in buckets if isinstance(buffer, torch.Tensor)],
        "mine": [[names[id(p)] for p in group] for group in getattr(optimizer, "params_in_partition", [])],
        "groups": len(getattr(optimizer, "fp16_groups", [])),
        "persistent": sum(getattr(parameter, "ds_persist", False) for parameter in parameters),
        "kept": [str(getattr(getattr(p, "ds_tensor", None), "final_location", "")) for p in parameters],
        "leaves": sum(map(z3_leaf_module, engine.module.modules())) if hasattr(optimizer, "parameter_offload") else 0,
        "collects": gc.isenabled(),
        "states": sorted({str(value.dtype) for value in states if isinstance(value, torch.Tensor) and value.dim()}),
        "secondary": [getattr(p, "ds_secondary_tensor", None) is not None for p in parameters],
    }


def forget() -> None:
    """Undoes what DeepSpeed keeps for the whole process, so that the next engine is as the first."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}


if __name__ == "__main__":
    ask_deepspeed(Path(sys.argv[1]))
