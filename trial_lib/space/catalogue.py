"""The known knobs, each with the place where DeepSpeed reads it. A knob without an effect is not searched.

Read from DeepSpeed 0.19.8. Each effect names its place below `deepspeed/runtime`. Pure: standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trial_lib.deepspeed_config.rules import ZERO_KEYS
from trial_lib.space.effects import Effect, KnownKnob, Surroundings, ValuesOf
from trial_lib.space.knobs import STAGE, get_knob

OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
_DEVICES = ("none", "cpu", "nvme")
_OFFLOADED = ("cpu", "nvme")
_BUCKETS = (1_000_000_000, 100_000_000, 50_000_000, 10_000_000, 1_000_000)


def nvme_path(base_config: Mapping[str, Any]) -> str | None:
    """Returns the NVMe device of the user's configuration; None if it names none."""
    sections = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
    paths = (get_knob(base_config, f"{section}.nvme_path") for section in sections)
    return next((str(path) for path in paths if path), None)


def _cpu(here: Surroundings, own: Any) -> tuple[str, ...]:
    return "none", "cpu"


def _cpu_or_nvme(here: Surroundings, own: Any) -> tuple[str, ...]:
    return _DEVICES if nvme_path(here.base_config) else ("none", "cpu")


def _own(here: Surroundings, own: Any) -> tuple[str, ...]:
    """Varies the user's own offload and nothing else. On a CPU it runs, and gains nothing."""
    return ("none", own) if own in _OFFLOADED else ()


def _switch(first: bool) -> ValuesOf:
    return lambda here, own: (first, not first) if own is None else (bool(own), not own)


def _copied(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # The copy of gradients keeps a CUDA allocator's memory in one piece. A CPU does not need that.
    return _switch(here.device == "cuda")(here, own)


def _partitioned(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # `checkpointing.configure`: contiguous checkpointing needs partitioned activations.
    contiguous = here.own("activation_checkpointing.contiguous_memory_optimization") is True
    return (True,) if own is True and contiguous else _switch(False)(here, own)


def _clamped(first: int, others: Iterable[int], most: int) -> tuple[int, ...]:
    """Returns sizes without repetition. A larger one than the most has the effect of the most."""
    return tuple(dict.fromkeys(min(int(elements), most) for elements in (first, *others)))


def _buckets(here: Surroundings, own: Any) -> tuple[int, ...]:
    # DeepSpeed allocates a whole bucket, whether the model fills it or not.
    return _clamped(own or 500_000_000, (500_000_000, *_BUCKETS), here.num_params)


def _prefetched(here: Surroundings, own: Any) -> tuple[int, ...]:
    first = 50_000_000 if own is None else own
    return _clamped(first, (50_000_000, 500_000_000, 5_000_000, 0), here.num_params)


def _live(here: Surroundings, own: Any) -> tuple[int, ...]:
    most = min(1_000_000_000, here.num_params)
    return _clamped(most if own is None else own, (most, most // 4), here.num_params)


def _persistent(here: Surroundings, own: Any) -> tuple[int, ...]:
    return _clamped(100_000 if own is None else own, (100_000, 1_000_000, 10_000), here.num_params)


def _sub_groups(here: Surroundings, own: Any) -> tuple[int, ...]:
    shard = here.trainable_num_params // here.replicas
    return _clamped(own or 1_000_000_000, (1_000_000_000, max(1, shard // 4)), here.num_params)


def _stage_3(word: str, source: str, candidates: ValuesOf) -> KnownKnob:
    return KnownKnob("count", (Effect(source, (3,), candidates=candidates),), word=word)


def _checkpointing(source: str, **takes: Any) -> tuple[Effect, ...]:
    source = f"activation_checkpointing/checkpointing.py {source}"
    not_read = "your code does not configure activation checkpointing by the DeepSpeed configuration"
    reads = {"holds": lambda here: here.reads_activation_checkpointing, "otherwise": not_read}
    return (Effect(source, **{**reads, **takes}),)


def _is_no_pipeline(here: Surroundings) -> bool:
    return not here.pipeline


def _sums_rank_by_rank(here: Surroundings) -> bool:
    return here.own("zero_optimization.use_multi_rank_bucket_allreduce") is False


_PIPELINE = "pipeline parallelism does not overlap communication"
_STAGE_1_2, _STAGE_3 = "zero/stage_1_and_2.py", "zero/stage3.py"


def _accumulates_in_fp32(here: Surroundings) -> bool:
    dtype = get_knob(here.base_config, "data_types.grad_accum_dtype")
    is_bf16 = any(get_knob(here.base_config, f"{section}.enabled") is True for section in ("bf16", "bfloat16"))
    return is_bf16 and dtype in ("fp32", "float32", "float", "torch.float32")


def _of_zeros_own(effect: Effect) -> tuple[Effect, ...]:
    """Returns an effect of the optimizer of stages 1 and 2, which DeepSpeed does not use for some of stage 1.

    `engine._do_optimizer_sanity_check`: bf16 that accumulates in fp32, without offload, uses `BF16_Optimizer`. It has
    no buckets and nothing to overlap.
    """

    def holds(here: Surroundings) -> bool:
        return not _accumulates_in_fp32(here) and (effect.holds is None or effect.holds(here))

    said = "at stage 1 bf16 that accumulates in fp32 has an optimizer of its own, which does not read it"
    of_1 = replace(effect, stages=(1,), holds=holds, otherwise=effect.otherwise or said)
    offloaded = replace(effect, stages=(1,), when={**effect.when, OFFLOAD_OPTIMIZER: _OFFLOADED})
    kept = () if OFFLOAD_OPTIMIZER in effect.when else (offloaded,)
    return (of_1, *kept, replace(effect, stages=(2,)))


KNOBS: dict[str, KnownKnob] = {
    OFFLOAD_OPTIMIZER: KnownKnob(
        _DEVICES,
        (
            Effect(f"{_STAGE_1_2} cpu_offload", (1, 2), ("cuda",), values=("none", "cpu"), candidates=_cpu),
            Effect(f"{_STAGE_3} _configure_offloading", (3,), ("cuda",), candidates=_cpu_or_nvme),
            Effect(f"{_STAGE_1_2} cpu_offload", (1, 2), ("cpu",), values=("none", "cpu"), candidates=_own),
            Effect(f"{_STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        ),
        default="none",
        is_coarse=True,
    ),
    OFFLOAD_PARAM: KnownKnob(
        _DEVICES,
        (
            Effect(f"{_STAGE_3} _configure_offloading", (3,), ("cuda",), candidates=_cpu_or_nvme),
            Effect(f"{_STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        ),
        default="none",
        is_coarse=True,
    ),
    "zero_optimization.offload_optimizer.pin_memory": KnownKnob(
        "switch",
        # accelerator/cpu_accelerator.py pin_memory does nothing on a CPU.
        (
            Effect(
                f"{_STAGE_1_2} cpu_offload_pin_memory, {_STAGE_3} offload_optimizer_pin_memory",
                (1, 2, 3),
                ("cuda",),
                when={OFFLOAD_OPTIMIZER: _OFFLOADED},
                candidates=_switch(True),
            ),
        ),
        word="pinned-optimizer",
    ),
    "zero_optimization.offload_param.pin_memory": KnownKnob(
        "switch",
        (
            Effect(
                "zero/partition_parameters.py _partition_param",
                (3,),
                ("cuda",),
                when={OFFLOAD_PARAM: _OFFLOADED},
                candidates=_switch(True),
            ),
        ),
        word="pinned-parameters",
    ),
    "zero_optimization.reduce_bucket_size": KnownKnob(
        "count",
        # Stage 0 sums in its own buckets: engine.py buffered_allreduce_fallback.
        (
            *_of_zeros_own(Effect(f"{_STAGE_1_2} setup_buckets", (1, 2), candidates=_buckets)),
            Effect(f"{_STAGE_3} ipg_buckets", (3,), candidates=_buckets),
        ),
        word="bucket",
    ),
    "zero_optimization.allgather_bucket_size": KnownKnob(
        "count",
        (
            Effect(
                "utils.py all_gather_dp_groups",
                (1, 2),
                holds=lambda here: False,
                otherwise="with torch 1.13 or later DeepSpeed gathers each partition whole",
            ),
        ),
        word="gather-bucket",
    ),
    "zero_optimization.overlap_comm": KnownKnob(
        "switch",
        (
            *_of_zeros_own(
                Effect(
                    f"{_STAGE_1_2} reduction_stream",
                    (1, 2),
                    ("cuda",),
                    replicas=2,
                    holds=_is_no_pipeline,
                    otherwise=_PIPELINE,
                    candidates=_switch(False),
                )
            ),
            Effect(f"{_STAGE_3} reduce_and_partition_stream", (3,), ("cuda",), replicas=2, candidates=_switch(True)),
            # A CPU has no streams to overlap. The setting only allocates a second bucket there.
            Effect(f"{_STAGE_1_2} setup_buckets", (1, 2), ("cpu",), holds=_is_no_pipeline, otherwise=_PIPELINE),
        ),
        word="overlap",
    ),
    "zero_optimization.reduce_scatter": KnownKnob(
        "switch",
        # Without contiguous_gradients it has no effect.
        (
            # Otherwise allreduce_and_scatter also sums whole buckets, and both engines communicate alike.
            Effect(
                f"{_STAGE_1_2} average_tensor",
                (1, 2),
                replicas=2,
                holds=_sums_rank_by_rank,
                otherwise="whole buckets are summed either way, while use_multi_rank_bucket_allreduce is on",
                candidates=_switch(True),
            ),
            Effect(f"{_STAGE_3} __reduce_and_partition_ipg_grads", (3,), replicas=2, candidates=_switch(True)),
        ),
        word="reduce-scatter",
    ),
    "zero_optimization.contiguous_gradients": KnownKnob(
        "switch",
        (
            # Offloading the optimizer turns it on.
            *_of_zeros_own(
                Effect(f"{_STAGE_1_2} setup_buckets", (1, 2), when={OFFLOAD_OPTIMIZER: ("none",)}, candidates=_copied)
            ),
            Effect(f"{_STAGE_3} __add_grad_to_ipg_bucket", (3,), candidates=_switch(True)),
        ),
        word="contiguous",
    ),
    "zero_optimization.round_robin_gradients": KnownKnob(
        "switch",
        (
            # zero/config.py: made for CPU offloading.
            Effect(
                f"{_STAGE_1_2} _round_robin_reorder",
                (1, 2),
                replicas=2,
                when={OFFLOAD_OPTIMIZER: _OFFLOADED},
                candidates=_switch(False),
            ),
            Effect(f"{_STAGE_1_2} _round_robin_reorder", (1, 2), replicas=2),
        ),
        word="round-robin",
    ),
    "zero_optimization.stage3_prefetch_bucket_size": _stage_3(
        "prefetch", "zero/partitioned_param_coordinator.py fetch_sub_module", _prefetched
    ),
    "zero_optimization.stage3_param_persistence_threshold": _stage_3(
        "persistence", "zero/parameter_offload.py mark_persistent_parameters", _persistent
    ),
    "zero_optimization.stage3_max_live_parameters": _stage_3(
        "live", "zero/partitioned_param_coordinator.py fetch_sub_module", _live
    ),
    "zero_optimization.sub_group_size": _stage_3("sub-group", f"{_STAGE_3} _create_fp16_sub_groups", _sub_groups),
    "zero_optimization.zero_hpz_partition_size": KnownKnob(
        "count",
        # A second partition over all replicas is the same as the first.
        (Effect("zero/partition_parameters.py ds_secondary_tensor", (3,), replicas=4),),
        default=1,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_weights": KnownKnob(
        "switch",
        (Effect("zero/partition_parameters.py CUDAQuantizer", (3,), ("cuda",)),),
        default=False,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": KnownKnob(
        "switch",
        (
            Effect(
                "zero/partition_parameters.py CUDAQuantizer",
                (3,),
                ("cuda",),
                holds=lambda here: here.trainable_num_params < here.num_params,
                otherwise="every parameter of the model trains",
            ),
        ),
        default=False,
        is_coarse=True,
    ),
    "zero_optimization.zero_quantized_gradients": KnownKnob(
        "switch",
        (
            Effect(
                f"{_STAGE_3} __avg_scatter_grads",
                (3,),
                ("cuda",),
                holds=lambda here: here.hosts > 1,
                otherwise="DeepSpeed quantizes gradients between machines, and a trial has one",
            ),
        ),
        default=False,
        is_coarse=True,
    ),
    "bf16.enabled": KnownKnob("switch", (Effect("engine.py get_data_types"),), default=False, is_coarse=True),
    "torch_autocast.enabled": KnownKnob(
        "switch",
        (Effect("torch_autocast.py autocast_if_enabled"),),
        default=False,
        is_coarse=True,
        since="0.17.2",
    ),
    "communication_data_type": KnownKnob(
        ("fp32", "fp16", "bf16"),
        (
            Effect("engine.py allreduce_bucket", (0,), replicas=2),
            # Under autocast every parameter has its own type.
            Effect(
                f"{_STAGE_1_2}, {_STAGE_3} comm_dtypes",
                (1, 2, 3),
                replicas=2,
                when={"torch_autocast.enabled": (False,)},
            ),
        ),
        is_coarse=True,
    ),
    "activation_checkpointing.partition_activations": KnownKnob(
        "switch",
        _checkpointing(
            "partition_activations",
            holds=lambda here: here.reads_activation_checkpointing and here.slots > here.replicas,
            otherwise="it takes a model over several devices, whose code configures activation checkpointing by the "
            "DeepSpeed configuration",
            candidates=_partitioned,
        ),
        default=False,
        is_coarse=True,
    ),
    "activation_checkpointing.cpu_checkpointing": KnownKnob(
        "switch",
        _checkpointing("CPU_CHECKPOINT", devices=("cuda",), candidates=_switch(False)),
        default=False,
        is_coarse=True,
    ),
    "activation_checkpointing.contiguous_memory_optimization": KnownKnob(
        "switch",
        _checkpointing("CONTIGUOUS_CHECKPOINTING", when={"activation_checkpointing.partition_activations": (True,)}),
        default=False,
        is_coarse=True,
    ),
}

# Sections whose every setting decides memory or mathematics, whether the catalogue has it or not.
_COARSE_SECTIONS = {
    "activation_checkpointing",
    "bf16",
    "bfloat16",
    "compression_training",
    "data_types",
    "fp16",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "tensor_parallel",
}

STAGE_3_NAMES = {
    f"zero_optimization.{key.removeprefix('stage3_')}": f"zero_optimization.{key}"
    for key in ZERO_KEYS
    if key.startswith("stage3_") and key.removeprefix("stage3_") in ZERO_KEYS
}
"""The short names of stage 3's settings, with the documented names that the catalogue has."""


def is_coarse(path: str) -> bool:
    """Returns whether a setting decides memory or mathematics, and so the arm of a candidate."""
    known = KNOBS.get(path)
    return path == STAGE or (known.is_coarse if known else path.partition(".")[0] in _COARSE_SECTIONS)


def catalogues_name(path: str) -> str:
    """Returns the catalogue's name for a setting."""
    return STAGE_3_NAMES.get(path, path)


def spelled(path: str, base_config: Mapping[str, Any]) -> str:
    """Returns the name of a setting in the user's configuration. DeepSpeed refuses both names side by side."""
    for short, name in STAGE_3_NAMES.items():
        if path in (short, name):
            return name if get_knob(base_config, short) is None else short
    return path
