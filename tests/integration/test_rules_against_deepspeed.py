"""Every rule of the table against real DeepSpeed, on a CPU: each one has a witness, or this file fails.

A rule about CPUs, or about any device, is seen here; one process tries all configurations on a model of two layers.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config import rules
from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM, ModelShape
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config, resolve_batch
from zerotune.trial_lib.deepspeed_config.rules import RULES, ZERO_KEYS, broken_rules
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import BatchSizes

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "optimizer": ADAM}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {**BASE, "zero_optimization": {"stage": stage, **keys}}


@dataclass(frozen=True)
class Refusal:
    """A configuration that breaks a rule, and what DeepSpeed says to it."""

    config: dict[str, Any]
    says: str
    pipeline: bool = False


@dataclass(frozen=True)
class Ignorance:
    """A configuration that breaks a rule leaves the same engine as `without`; `control`, which does not, another."""

    config: dict[str, Any]
    without: dict[str, Any]
    control: tuple[dict[str, Any], dict[str, Any]]
    pipeline: bool = False


@dataclass(frozen=True)
class Unevenness:
    """A configuration that divides three heads over two ranks. `test_tensor_parallel.py` sees what DeepSpeed does."""

    config: dict[str, Any]
    pipeline: bool = False


@dataclass(frozen=True)
class OnTwoRanks:
    """A layout of a program that DeepSpeed refuses on two ranks. `test_layouts.py` sees the refusal."""

    kind: str
    shape: ModelShape
    pipeline: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {**BASE, PROGRAM: {"--size": 2}, LAYOUTS: {"--size": self.kind}}


@dataclass(frozen=True)
class OfEightRanks:
    """A configuration of which DeepSpeed says no before eight ranks communicate."""

    config: dict[str, Any]
    pipeline: bool = False


CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
MUON = {"type": "Muon", "params": {"lr": 1e-3}}
SGD = {"type": "SGD", "params": {"lr": 1e-3}}

WITNESSES: dict[str, list[Refusal | Ignorance | Unevenness | OnTwoRanks]] = {
    "pipeline_with_zero_2_or_3": [
        Refusal(zero(stage), "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism", pipeline=True)
        for stage in (2, 3)
    ],
    "unknown_stage": [Refusal(zero(4), "Input should be 0, 1, 2, 3")],
    "misspelt_zero_key": [Refusal(zero(2, reduce_bucket_sise=5), "Extra inputs are not permitted")],
    "auto_batch": [
        Refusal({**BASE, key: "auto"}, "TypeError")
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ],
    "contradicting_batch": [
        Refusal({**BASE, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}, "Check batch related parameters")
    ],
    "fp16_and_bf16": [
        Refusal({**BASE, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "cannot be simultaneously enabled")
    ],
    "fp16_on_cpu": [Refusal({**BASE, "fp16": {"enabled": True}}, "Type fp16 is not supported")],
    "half_master_weights_at_stage_0": [
        Refusal(
            {**zero(0), dtype: {"enabled": True, f"{dtype}_master_weights_and_grads": True}},
            "only supported with ZeRO Stage 1, 2, or 3",
        )
        for dtype in ("bf16", "fp16")
    ],
    "half_master_weights_without_offload": [
        Refusal(
            {**zero(stage), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "Master weights feature requires",
        )
        for stage in (1, 2, 3)
    ],
    "accumulation_dtype_at_stage_0": [
        Refusal({**zero(0), "data_types": {"grad_accum_dtype": "bf16"}}, "unsupported mix"),
        Refusal({**zero(0), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "unsupported mix"),
    ],
    "lamb_on_cpu": [Refusal({**BASE, "optimizer": {"type": "Lamb", "params": {}}}, "not been implemented on CPU")],
    "untested_optimizer_under_zero": [Refusal({**zero(1), "optimizer": SGD}, "untested ZeRO Optimizer")],
    "quantized_weights_on_cpu": [
        Refusal(zero(3, zero_quantized_weights=True), "not been implemented on CPU"),
        Refusal(zero(3, zero_quantized_nontrainable_weights=True), "not been implemented on CPU"),
    ],
    "quantized_weights_under_autocast": [
        Refusal(
            {**zero(stage, zero_quantized_weights=True), "torch_autocast": {"enabled": True}},
            "Cannot enable both torch autocast and zero quantized weights",
        )
        for stage in (0, 2)
    ],
    "quantized_gradients_without_reduce_scatter": [
        Refusal(zero(3, zero_quantized_gradients=True, reduce_scatter=False), "reduce_scatter should also be enabled")
    ],
    "muon_with_reduce_scatter": [
        Refusal({**config, "optimizer": MUON}, "Muon and reduce scatter cannot be used together")
        for config in (zero(3), zero(3, reduce_scatter=True))
    ],
    "odd_allgather_bucket": [
        Refusal(zero(stage, allgather_bucket_size=1001), "must be a multiple of nccl_start_alignment_factor")
        for stage in (1, 2)
    ],
    "partial_offload_below_stage_3": [
        Refusal(zero(2, offload_optimizer={**CPU, "ratio": 0.5}), "Partial offloading only supported for ZeRO Stage 3")
    ],
    "nvme_without_path": [
        Refusal(zero(3, offload_param=NVME), "nvme_path"),
        Refusal(zero(3, offload_optimizer=NVME), "not NoneType"),
    ],
    "summed_gradients_at_stage_3": [
        Refusal({**zero(3), "gradient_allreduce_op": "sum"}, "not supported with ZeRO stage 3")
    ],
    "scaled_gradients_with_reduce_scatter": [
        Refusal({**zero(stage), **scaled}, "not yet supported with ZeRO-")
        for stage in (2, 3)
        for scaled in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0})
    ],
    "compute_grad_norm_off": [
        Refusal({**zero(0, compute_grad_norm=False), "gradient_clipping": 0}, "only with ZeRO Stage 1 or 2"),
        Refusal({**zero(3, compute_grad_norm=False), "gradient_clipping": 0}, "only with ZeRO Stage 1 or 2"),
        Refusal(
            {**zero(1, compute_grad_norm=False, offload_optimizer=CPU), "gradient_clipping": 0},
            "does not support optimizer offload",
        ),
    ],
    "autotuning_enabled": [
        Refusal({**BASE, "autotuning": {"enabled": True, "start_profile_step": 1, "end_profile_step": 2}}, "SystemExit")
    ],
    "offload_param_below_stage_3": [
        Ignorance(zero(stage, offload_param=CPU), zero(stage), control=(zero(3, offload_param=CPU), zero(3)))
        for stage in (0, 1, 2)
    ],
    "offload_optimizer_at_stage_0": [
        Ignorance(zero(0, offload_optimizer=CPU), zero(0), control=(zero(1, offload_optimizer=CPU), zero(1)))
    ],
    "nvme_below_stage_3": [
        Ignorance(
            zero(2, offload_optimizer=NVME),
            zero(2, offload_optimizer=CPU),
            control=(zero(2, offload_optimizer=CPU), zero(2)),
        )
    ],
    "zero_plus_plus_below_stage_3": [
        Ignorance(
            zero(2, **{key: value}),
            zero(2),
            control=(zero(3, zero_hpz_partition_size=2), zero(3)),
        )
        for key, value in (
            ("zero_hpz_partition_size", 2),
            ("zero_quantized_weights", True),
            ("zero_quantized_nontrainable_weights", True),
            ("zero_quantized_gradients", True),
        )
    ],
    "overlap_comm_in_a_pipeline": [
        Ignorance(zero(1, overlap_comm=True), zero(1), pipeline=True, control=(zero(1, overlap_comm=True), zero(1)))
    ],
    "undivided_devices": [Refusal({**BASE, "tensor_parallel": {"autotp_size": 2}}, "AssertionError")],
    "undivided_heads": [Unevenness({**BASE, "tensor_parallel": {"autotp_size": 2}})],
    "undivided_secondary_partition": [OfEightRanks(zero(3, zero_hpz_partition_size=3))],
    "unshared_heads": [OnTwoRanks("sequence", ModelShape((3,)))],
    "unshared_tokens": [OnTwoRanks("sequence", ModelShape(sequence_length=15))],
    "empty_stages": [OnTwoRanks("pipeline", ModelShape(layer_count=1))],
    "undivided_experts": [OnTwoRanks("expert", ModelShape(expert_counts=(3,)))],
}
SLOTS, HEADS = 1, (3,)

BATCHES = [
    {"train_batch_size": 32},
    {"train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 32, "gradient_accumulation_steps": 2},
    {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
    {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4},
    {"train_batch_size": 1},
    {"gradient_accumulation_steps": 2},
    {"train_batch_size": 0},
    {"train_micro_batch_size_per_gpu": -1},
    {},
]
REPLICAS = (1, 2, 3)

Trial = tuple[dict[str, Any], bool]


def every_trial() -> list[Trial]:
    trials: list[Trial] = []
    for witnesses in WITNESSES.values():
        for witness in witnesses:
            if isinstance(witness, (Unevenness, OnTwoRanks, OfEightRanks)):
                continue
            trials.append((witness.config, witness.pipeline))
            if isinstance(witness, Ignorance):
                trials += [(witness.without, witness.pipeline), *((config, False) for config in witness.control)]
    return [trial for index, trial in enumerate(trials) if trial not in trials[:index]]


@pytest.fixture(scope="module")
def deepspeed_says(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = tmp_path_factory.mktemp("deepspeed") / "answers.json"
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    completed = subprocess.run(
        [sys.executable, __file__, str(answers)],
        env={**os.environ, **one_rank, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=answers.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(answers.read_text())


def answer(deepspeed_says: dict[str, Any], config: dict[str, Any], pipeline: bool) -> dict[str, Any]:
    return deepspeed_says["trials"][every_trial().index((config, pipeline))]


def test_every_rule_has_a_witness() -> None:
    assert list(WITNESSES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_table_finds_its_witnesses(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "processor_computes_fp16", lambda: False)
    for witness in WITNESSES[rule.name]:
        slots, shape = (2, witness.shape) if isinstance(witness, OnTwoRanks) else (SLOTS, ModelShape(HEADS))
        slots = 8 if isinstance(witness, OfEightRanks) else slots
        found = broken_rules(witness.config, "cpu", witness.pipeline, None, slots=slots, shape=shape)
        broken = {each.name: each for each in found}
        assert rule.name in broken, witness
        assert broken[rule.name].reason.endswith("."), broken[rule.name].reason


@pytest.mark.long
@pytest.mark.parametrize(
    "rule",
    [
        rule
        for rule in RULES
        if rule.effect == "refused" and not isinstance(WITNESSES[rule.name][0], (OnTwoRanks, OfEightRanks))
    ],
    ids=lambda rule: rule.name,
)
def test_deepspeed_refuses_it(rule: Any, deepspeed_says: dict[str, Any]) -> None:
    for witness in WITNESSES[rule.name]:
        assert isinstance(witness, Refusal)
        said = answer(deepspeed_says, witness.config, witness.pipeline)
        if rule.name == "fp16_on_cpu" and rules.processor_computes_fp16():
            assert "engine" in said, "a processor that computes fp16 trains"
            continue
        assert witness.says in said.get("error", "nothing: it trained"), witness


@pytest.mark.parametrize(
    ("size", "is_divided"),
    [
        (2, True),
        (3, False),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, True), (6, False), (9, True))),
    ],
)
def test_deepspeed_divides_all_ranks_into_secondary_partitions(
    size: int, is_divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.utils import groups

    of_eight = {"is_initialized": True, "get_world_size": 8, "get_rank": 0, "new_group": None}
    for name, value in of_eight.items():
        monkeypatch.setattr(groups.dist, name, lambda *_, value=value: value)
    monkeypatch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
    broken = [rule.name for rule in broken_rules(zero(3, zero_hpz_partition_size=size), "cpu", False, 8, slots=8)]
    assert ("undivided_secondary_partition" not in broken) == is_divided
    if is_divided:
        groups._create_zero_param_parallel_group(size)
    else:
        with pytest.raises(AssertionError, match="not divisible"):
            groups._create_zero_param_parallel_group(size)


@pytest.mark.long
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.effect == "ignored"], ids=lambda rule: rule.name)
def test_deepspeed_ignores_it(rule: Any, deepspeed_says: dict[str, Any]) -> None:
    for witness in WITNESSES[rule.name]:
        assert isinstance(witness, Ignorance)
        engine = answer(deepspeed_says, witness.config, witness.pipeline)["engine"]
        assert engine == answer(deepspeed_says, witness.without, witness.pipeline)["engine"], witness
        effective, plain = (answer(deepspeed_says, config, False)["engine"] for config in witness.control)
        assert effective != plain, "the control shows no effect, so its absence proves nothing"


@pytest.mark.long
@pytest.mark.parametrize(
    "config", [zero(0), zero(1, overlap_comm=True), zero(2), zero(3), zero(3, offload_param=CPU)], ids=json.dumps
)
def test_a_configuration_that_trains_breaks_no_rule(config: dict[str, Any], deepspeed_says: dict[str, Any]) -> None:
    assert "engine" in answer(deepspeed_says, config, False)
    assert broken_rules(config, "cpu", pipeline_parallel=False, data_parallel_size=1) == []


@pytest.mark.long
def test_the_known_zero_keys_are_deepspeeds(deepspeed_says: dict[str, Any]) -> None:
    assert set(deepspeed_says["zero_keys"]) == ZERO_KEYS


@pytest.mark.long
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("config", BATCHES, ids=json.dumps)
def test_the_batch_is_derived_as_deepspeed_derives_it(
    config: dict[str, int], replicas: int, deepspeed_says: dict[str, Any]
) -> None:
    theirs = deepspeed_says["batches"][str(replicas)][BATCHES.index(config)]
    if theirs is None:
        with pytest.raises(InputError):
            resolve_batch(config, replicas)
    else:
        assert resolve_batch(config, replicas) == BatchSizes(*theirs)


# What follows runs in the one process that has DeepSpeed.


def ask_deepspeed(answers: Path) -> None:
    import deepspeed
    import torch
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    fields = DeepSpeedZeroConfig.model_fields
    said = {
        "trials": [try_config(config, pipeline) for config, pipeline in every_trial()],
        "zero_keys": sorted({*fields, *(field.alias for field in fields.values() if field.alias)}),
        "batches": {
            replicas: [derive(DeepSpeedConfig, config, replicas) for config in BATCHES] for replicas in REPLICAS
        },
    }
    answers.write_text(json.dumps(said))


def try_config(config: dict[str, Any], pipeline: bool) -> dict[str, Any]:
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    loss_fn = torch.nn.MSELoss()
    model = PipelineModule(layers, num_stages=1, loss_fn=loss_fn) if pipeline else torch.nn.Sequential(*layers)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=overwrite_deepspeed_config(config, {})
        )
        batch = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype)
        for _ in range(3):
            if pipeline:
                engine.train_batch(iter([(batch, batch)]))
            else:
                engine.backward(loss_fn(engine(batch), batch))
                engine.step()
    except (Exception, SystemExit) as error:  # noqa: BLE001 whatever DeepSpeed says is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"engine": effects(engine)}


def effects(engine: Any) -> dict[str, Any]:
    """Returns what tells two engines apart: the optimizers' types and settings, and how parameters are kept."""
    import torch

    optimizer = engine.optimizer
    settings = {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, str))}
    devices = {key: str(value) for key, value in vars(optimizer).items() if isinstance(value, torch.device)}
    inner = getattr(optimizer, "optimizer", None)
    kept = sorted(
        str(getattr(getattr(p, "ds_tensor", None), "final_location", None)) for p in engine.module.parameters()
    )
    return {**settings, **devices, "types": [type(optimizer).__name__, type(inner).__name__], "parameters": kept}


def derive(deepspeed_config: Any, config: dict[str, int], replicas: int) -> list[int] | None:
    blank = deepspeed_config.__new__(deepspeed_config)
    blank.world_size = replicas
    blank.train_batch_size = config.get("train_batch_size")
    blank.train_micro_batch_size_per_gpu = config.get("train_micro_batch_size_per_gpu")
    blank.gradient_accumulation_steps = config.get("gradient_accumulation_steps")
    try:
        blank._configure_train_batch_size()
    except (AssertionError, ZeroDivisionError):
        return None
    return [blank.train_batch_size, blank.train_micro_batch_size_per_gpu, blank.gradient_accumulation_steps]


if __name__ == "__main__":
    ask_deepspeed(Path(sys.argv[1]))
