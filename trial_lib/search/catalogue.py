"""The known knobs, each with the place where DeepSpeed reads it. A knob without an effect is not searched.

Read from DeepSpeed 0.19.8. Each effect names its place below `deepspeed/runtime`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import AUTOEP, AUTOTP
from zerotune.trial_lib.deepspeed_config.overrides import is_bf16_with_32_bit_sums
from zerotune.trial_lib.deepspeed_config.rules import ZERO_KEYS, is_deepspeeds_cpu_adam
from zerotune.trial_lib.messages.turned import COMPILE
from zerotune.trial_lib.records.switches import path_of
from zerotune.trial_lib.search.effects import (
    STAGE_1_2,
    STAGE_3,
    Effect,
    Kind,
    KnownKnob,
    Surroundings,
    ValuesOf,
    clamped,
    switch,
    undivided,
)
from zerotune.trial_lib.search.knobs import STAGE, get_knob


def _knob(kind: Kind, *effects: Effect, **terms: Any) -> KnownKnob:
    return KnownKnob(kind, effects, **terms)


def _coarse(kind: Kind, *effects: Effect, default: Any = False, **terms: Any) -> KnownKnob:
    return KnownKnob(kind, effects, default, is_coarse=True, **terms)


def _on_gpu(source: str, stages: tuple[int, ...], **terms: Any) -> Effect:
    return Effect(source, stages, ("cuda",), **terms)


# Offload of the optimizer and of parameters.

OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
NVME_PATHS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")
"""The NVMe device of the optimizer, and that of parameters. They may be two disks."""
OFFLOADED = ("cpu", "nvme")
KEPT_GATHERED = ("zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance")
"""What stage 3 keeps gathered. With parameters on NVMe, DeepSpeed 0.19.8 fails unless both are 0 (its issue 3062)."""
SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"
_DEVICES = ("none", "cpu", "nvme")
_SWAPPER = "swap_tensor/pipelined_optimizer_swapper.py"
_BUFFER_COUNT = "zero_optimization.offload_optimizer.buffer_count"
# Two sub-groups, each with the master copy, two moments and the gradient.
_PIPELINED_BUFFERS = 8
_SUB_GROUP = 1_000_000_000  # DeepSpeed's default
_TO_CPU, _TO_NVME = {OFFLOAD_OPTIMIZER: ("cpu",)}, {OFFLOAD_OPTIMIZER: ("nvme",)}


def nvme_path(base_config: Mapping[str, Any]) -> str | None:
    """Returns the NVMe device of the user's configuration, the optimizer's if it names two; None if it names none."""
    paths = (get_knob(base_config, path) for path in NVME_PATHS)
    return next((str(path) for path in paths if path), None)


def _cpu_or_nvme(here: Surroundings, own: Any) -> tuple[str, ...]:
    return _DEVICES if nvme_path(here.base_config) else ("none", "cpu")


def _own(here: Surroundings, own: Any) -> tuple[str, ...]:
    # Varies the user's own offload and nothing else. On a CPU it runs, and gains nothing.
    return ("none", own) if own in OFFLOADED else ()


def _ratios(here: Surroundings, own: Any) -> tuple[float, ...]:
    # zero/stage3.py subgroup_to_device: whole sub-groups stay on the device, so a model of one has no choice.
    first = 1.0 if own is None else float(own)
    shard = here.trainable_num_params / here.replicas
    sub_groups = math.ceil(shard / (here.own("zero_optimization.sub_group_size") or _SUB_GROUP))
    others = [ratio for ratio in (0.75, 0.5, 0.25) if int((1 - ratio) * sub_groups) > 0]
    return tuple(dict.fromkeys((first, *others))) if others else ()


def _pipelined(place: str) -> Effect:
    return Effect(
        f"{_SWAPPER} {place}",
        (3,),
        when=_TO_NVME,
        holds=lambda here: (here.own(_BUFFER_COUNT) or 0) >= _PIPELINED_BUFFERS,
        otherwise=f"DeepSpeed fails with fewer than {_PIPELINED_BUFFERS} buffers (`buffer_count` of offload_optimizer)",
        candidates=switch(False),
    )


def _zenflow(key: str, kind: Kind) -> dict[str, KnownKnob]:
    # A setting of ZenFlow (arXiv 2505.12242), whose section turns it on: it updates some gradients later.
    source = "zenflow/zenflow_stage_1_and_2.py, zenflow/engine_stage3.py"
    effect = _on_gpu(f"{source} {key}", (1, 2, 3), when=_TO_CPU)
    known = _coarse(kind, effect, default=None, changes_mathematics=True, since="0.17.5")
    return {f"zero_optimization.zenflow.{key}": known}


OFFLOAD: dict[str, KnownKnob] = {
    OFFLOAD_OPTIMIZER: _coarse(
        _DEVICES,
        _on_gpu(
            f"{STAGE_1_2} cpu_offload", (1, 2), values=("none", "cpu"), candidates=lambda here, own: ("none", "cpu")
        ),
        _on_gpu(f"{STAGE_3} _configure_offloading", (3,), candidates=_cpu_or_nvme),
        Effect(f"{STAGE_1_2} cpu_offload", (1, 2), ("cpu",), values=("none", "cpu"), candidates=_own),
        Effect(f"{STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        default="none",
    ),
    OFFLOAD_PARAM: _coarse(
        _DEVICES,
        _on_gpu(f"{STAGE_3} _configure_offloading", (3,), candidates=_cpu_or_nvme),
        Effect(f"{STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        default="none",
    ),
    "zero_optimization.offload_optimizer.pin_memory": _knob(
        "switch",
        # accelerator/cpu_accelerator.py pin_memory does nothing on a CPU.
        _on_gpu(
            f"{STAGE_1_2} cpu_offload_pin_memory, {STAGE_3} offload_optimizer_pin_memory",
            (1, 2, 3),
            when={OFFLOAD_OPTIMIZER: OFFLOADED},
            candidates=switch(True),
        ),
        word="pinned-optimizer",
    ),
    "zero_optimization.offload_param.pin_memory": _knob(
        "switch",
        _on_gpu(
            "zero/partition_parameters.py _partition_param",
            (3,),
            when={OFFLOAD_PARAM: OFFLOADED},
            candidates=switch(True),
        ),
        word="pinned-parameters",
    ),
    "zero_optimization.offload_optimizer.ratio": _knob(
        "share",
        # On a CPU the device and the host are one.
        _on_gpu(
            f"{STAGE_3} subgroup_to_device",
            (3,),
            when=_TO_CPU,
            holds=lambda here: is_deepspeeds_cpu_adam(here.base_config, here.program.optimizer),
            otherwise="DeepSpeed splits its own Adam only, by the configuration or as DeepSpeedCPUAdam",
            candidates=_ratios,
        ),
        since="0.12.3",
        word="offloaded",
    ),
    "zero_optimization.offload_optimizer.pipeline_read": _knob(
        "switch", _pipelined("async_swap_in"), word="pipelined-read"
    ),
    "zero_optimization.offload_optimizer.pipeline_write": _knob(
        "switch", _pipelined("async_swap_out"), word="pipelined-write"
    ),
    # It is made for a CPU and a GPU that share a fast link, and no fact of a trial tells of one.
    SUPER_OFFLOAD: _coarse(
        "switch", _on_gpu("superoffload/superoffload_stage3.py", (3,), when=_TO_CPU), since="0.18.0"
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _knob(
        "share",
        _on_gpu("superoffload/superoffload_utils.py _set_cpu_affinity", (3,), when={**_TO_CPU, SUPER_OFFLOAD: (True,)}),
        since="0.18.0",
        word="adam-cores",
    ),
    **_zenflow("topk_ratio", "share"),
    **_zenflow("update_interval", "count"),
    **_zenflow("select_interval", "count"),
    **_zenflow("overlap_step", "switch"),
    **_zenflow("full_warm_up_rounds", "count"),
    **_zenflow("select_strategy", ("auto", "step", "epoch")),
}


# Reduction of gradients: buckets, overlap, and the way of the sum.

_BUCKETS = (1_000_000_000, 100_000_000, 50_000_000, 10_000_000, 1_000_000)
_PIPELINE = "pipeline parallelism does not overlap communication"


def _copied(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # The copy of gradients keeps a CUDA allocator's memory in one piece. A CPU does not need that.
    return switch(here.device == "cuda")(here, own)


def _buckets(here: Surroundings, own: Any) -> tuple[int, ...]:
    # DeepSpeed allocates a whole bucket, whether the model fills it or not.
    return clamped(own or 500_000_000, (500_000_000, *_BUCKETS), here.num_params)


def _is_no_pipeline(here: Surroundings) -> bool:
    return not here.pipeline


def _of_zeros_own(effect: Effect) -> tuple[Effect, ...]:
    """Returns an effect of the optimizer of stages 1 and 2, which DeepSpeed does not use for some of stage 1.
    `engine._do_optimizer_sanity_check`: bf16 that accumulates in fp32, without offload, uses `BF16_Optimizer`. It has
    no buckets and nothing to overlap.
    """

    def holds(here: Surroundings) -> bool:
        return not is_bf16_with_32_bit_sums(here.base_config) and (effect.holds is None or effect.holds(here))

    why = "at stage 1 bf16 that accumulates in fp32 has an optimizer of its own, which does not read it"
    of_1 = replace(effect, stages=(1,), holds=holds, otherwise=effect.otherwise or why)
    offloaded = replace(effect, stages=(1,), when={**effect.when, OFFLOAD_OPTIMIZER: OFFLOADED})
    kept = () if OFFLOAD_OPTIMIZER in effect.when else (offloaded,)
    return (of_1, *kept, replace(effect, stages=(2,)))


REDUCTION: dict[str, KnownKnob] = {
    "zero_optimization.reduce_bucket_size": _knob(
        "count",
        # Stage 0 sums in its own buckets: engine.py buffered_allreduce_fallback.
        *_of_zeros_own(Effect(f"{STAGE_1_2} setup_buckets", (1, 2), candidates=_buckets)),
        Effect(f"{STAGE_3} ipg_buckets", (3,), candidates=_buckets),
        word="bucket",
    ),
    "zero_optimization.allgather_bucket_size": _knob(
        "count",
        Effect(
            "utils.py all_gather_dp_groups",
            (1, 2),
            holds=lambda here: False,
            otherwise="with torch 1.13 or later DeepSpeed gathers each partition whole",
        ),
        word="gather-bucket",
    ),
    "zero_optimization.overlap_comm": _knob(
        "switch",
        *_of_zeros_own(
            _on_gpu(
                f"{STAGE_1_2} reduction_stream",
                (1, 2),
                replicas=2,
                holds=_is_no_pipeline,
                otherwise=_PIPELINE,
                candidates=switch(False),
            )
        ),
        _on_gpu(f"{STAGE_3} reduce_and_partition_stream", (3,), replicas=2, candidates=switch(True)),
        # A CPU has no streams to overlap. The setting only allocates a second bucket there.
        Effect(f"{STAGE_1_2} setup_buckets", (1, 2), ("cpu",), holds=_is_no_pipeline, otherwise=_PIPELINE),
        word="overlap",
    ),
    "zero_optimization.reduce_scatter": _knob(
        "switch",
        # Without contiguous_gradients it has no effect.
        # Otherwise allreduce_and_scatter also sums whole buckets, and both engines communicate alike.
        Effect(
            f"{STAGE_1_2} average_tensor",
            (1, 2),
            replicas=2,
            holds=lambda here: here.own("zero_optimization.use_multi_rank_bucket_allreduce") is False,
            otherwise="whole buckets are summed either way, while use_multi_rank_bucket_allreduce is on",
            candidates=switch(True),
        ),
        Effect(f"{STAGE_3} __reduce_and_partition_ipg_grads", (3,), replicas=2, candidates=switch(True)),
        word="reduce-scatter",
    ),
    "zero_optimization.contiguous_gradients": _knob(
        "switch",
        # Offloading the optimizer turns it on.
        *_of_zeros_own(
            Effect(f"{STAGE_1_2} setup_buckets", (1, 2), when={OFFLOAD_OPTIMIZER: ("none",)}, candidates=_copied)
        ),
        Effect(f"{STAGE_3} __add_grad_to_ipg_bucket", (3,), candidates=switch(True)),
        word="contiguous",
    ),
    "zero_optimization.round_robin_gradients": _knob(
        "switch",
        # zero/config.py: made for CPU offloading.
        Effect(
            f"{STAGE_1_2} _round_robin_reorder",
            (1, 2),
            replicas=2,
            when={OFFLOAD_OPTIMIZER: OFFLOADED},
            candidates=switch(False),
        ),
        Effect(f"{STAGE_1_2} _round_robin_reorder", (1, 2), replicas=2),
        word="round-robin",
    ),
}


# Parameters that stage 3 partitions: which are gathered, when, and in what groups.


def _prefetched(here: Surroundings, own: Any) -> tuple[int, ...]:
    first = 50_000_000 if own is None else own
    return clamped(first, (50_000_000, 500_000_000, 5_000_000, 0), here.num_params)


def _live(here: Surroundings, own: Any) -> tuple[int, ...]:
    most = min(1_000_000_000, here.num_params)
    return clamped(most if own is None else own, (most, most // 4), here.num_params)


def _persistent(here: Surroundings, own: Any) -> tuple[int, ...]:
    return clamped(100_000 if own is None else own, (100_000, 1_000_000, 10_000), here.num_params)


def _sub_groups(here: Surroundings, own: Any) -> tuple[int, ...]:
    shard = here.trainable_num_params // here.replicas
    return clamped(own or 1_000_000_000, (1_000_000_000, max(1, shard // 4)), here.num_params)


def _stage_3(word: str, source: str, candidates: ValuesOf) -> KnownKnob:
    return _knob("count", Effect(source, (3,), candidates=candidates), word=word)


def _leaf_modules(key: str) -> dict[str, KnownKnob]:
    # A list of modules that stage 3 gathers whole. Only the user knows which modules there are.
    known = _knob("names", Effect(f"zero/leaf_module_config.py {key}", (3,)), since="0.18.0", word=f"leaf-{key}")
    return {f"zero_optimization.leaf_module.{key}": known}


PARTITIONED_PARAMETERS: dict[str, KnownKnob] = {
    "zero_optimization.stage3_prefetch_bucket_size": _stage_3(
        "prefetch", "zero/partitioned_param_coordinator.py fetch_sub_module", _prefetched
    ),
    "zero_optimization.stage3_param_persistence_threshold": _stage_3(
        "persistence", "zero/parameter_offload.py mark_persistent_parameters", _persistent
    ),
    "zero_optimization.stage3_max_live_parameters": _stage_3(
        "live", "zero/partitioned_param_coordinator.py fetch_sub_module", _live
    ),
    "zero_optimization.sub_group_size": _stage_3("sub-group", f"{STAGE_3} _create_fp16_sub_groups", _sub_groups),
    # Useful values depend on the modules: the parameters of a module over its inner modules (parameter_offload.py).
    "zero_optimization.stage3_module_granularity_threshold": _knob(
        "count",
        Effect("zero/parameter_offload.py _set_z3_leaf_modules_by_threshold", (3,)),
        since="0.16.0",
        word="granularity",
    ),
    **_leaf_modules("classes"),
    **_leaf_modules("names"),
    **_leaf_modules("name_suffixes"),
}


# ZeRO++: a second partition within a host, and quantised communication.

ZERO_PLUS_PLUS: dict[str, KnownKnob] = {
    "zero_optimization.zero_hpz_partition_size": _coarse(
        "count",
        # A second partition over all replicas is the same as the first.
        Effect("zero/partition_parameters.py ds_secondary_tensor", (3,), replicas=4),
        default=1,
    ),
    "zero_optimization.zero_quantized_weights": _coarse(
        "switch", _on_gpu("zero/partition_parameters.py CUDAQuantizer", (3,))
    ),
    "zero_optimization.zero_quantized_nontrainable_weights": _coarse(
        "switch",
        _on_gpu(
            "zero/partition_parameters.py CUDAQuantizer",
            (3,),
            holds=lambda here: here.trainable_num_params < here.num_params,
            otherwise="every parameter of the model trains",
        ),
    ),
    "zero_optimization.zero_quantized_gradients": _coarse(
        "switch",
        _on_gpu(
            f"{STAGE_3} __avg_scatter_grads",
            (3,),
            holds=lambda here: here.hosts > 1,
            otherwise="DeepSpeed quantizes gradients between machines, and a trial has one",
        ),
    ),
}


# The layout: how many ranks hold one replica of the model together.


def _tensor_sizes(here: Surroundings, own: Any) -> tuple[int, ...]:
    """Returns the sizes of tensor-parallel groups to try: the user's, and its divisors. Without a request they are
    tried only if the user trains so. On a node of 8 GPUs a group is never faster by itself
    (huggingface.co/spaces/nanotron/ultrascale-playbook), and a script may feed its ranks different batches.
    """
    if not isinstance(own, int) or own <= 1:
        return ()
    return (own, *(size for size in range(1, own) if own % size == 0 and not undivided(AUTOTP, size, here)))


def _of_groups(source: str, devices: tuple[str, ...] = ("cpu", "cuda"), **when: tuple[Any, ...]) -> Effect:
    beside = {f"tensor_parallel.{key}": values for key, values in when.items()}
    return Effect(source, devices=devices, when=beside, unless={AUTOTP: (0, 1)})


LAYOUT: dict[str, KnownKnob] = {
    AUTOTP: _coarse(
        "size",
        Effect(
            "engine.py _configure_tensor_parallel",
            holds=lambda here: not here.pipeline,
            otherwise="AutoTP does not divide the stages of a pipeline",
            candidates=_tensor_sizes,
        ),
        default=1,
        since="0.16.4",
    ),
    # DeepSpeed 0.19.8 sums a layer's gradients of the bias over the first dimension alone, so a bias ends the trial.
    "tensor_parallel.tp_overlap_comm": _knob(
        "switch", _of_groups("../module_inject/layers.py AsyncColumnParallel"), since="0.16.6", word="tp-overlap"
    ),
    # It takes a `lm_head` and the loss of transformers. Without a value DeepSpeed divides a head that shares its
    # weights with the embedding, if the model's own plan says so.
    "tensor_parallel.vocab_parallel_lm_head": _coarse(
        "switch", _of_groups("engine.py finalize_autotp"), default=None, since="0.19.8"
    ),
    "tensor_parallel.vocab_parallel_ce_backend": _coarse(
        ("torch", "liger"),
        _of_groups("../sequence/cross_entropy.py _liger_can_run", ("cuda",), vocab_parallel_lm_head=(True,)),
        default="torch",
        since="0.19.8",
    ),
    # Each rank has a batch of its own, and its share of the experts.
    AUTOEP: _coarse(
        "size",
        Effect("engine.py _configure_expert_parallel", when={"expert_parallel.enabled": (True,)}),
        default=1,
        since="0.19.2",
    ),
}


# DeepSpeed's own activation checkpointing, for code that configures it by the DeepSpeed configuration.


def _partitioned(here: Surroundings, own: Any) -> tuple[bool, ...]:
    # `checkpointing.configure`: contiguous checkpointing needs partitioned activations.
    contiguous = here.own("activation_checkpointing.contiguous_memory_optimization") is True
    return (True,) if own is True and contiguous else switch(False)(here, own)


def _checkpointing(source: str, **takes: Any) -> Effect:
    source = f"activation_checkpointing/checkpointing.py {source}"
    not_read = "your code does not configure activation checkpointing by the DeepSpeed configuration"
    reads = {"holds": lambda here: here.program.reads_activation_checkpointing, "otherwise": not_read}
    return Effect(source, **{**reads, **takes})


ACTIVATIONS: dict[str, KnownKnob] = {
    "activation_checkpointing.partition_activations": _coarse(
        "switch",
        _checkpointing(
            "partition_activations",
            holds=lambda here: here.program.reads_activation_checkpointing and here.slots > here.replicas,
            otherwise="it takes a model over several devices, whose code configures activation checkpointing by the "
            "DeepSpeed configuration",
            candidates=_partitioned,
        ),
    ),
    "activation_checkpointing.cpu_checkpointing": _coarse(
        "switch", _checkpointing("CPU_CHECKPOINT", devices=("cuda",), candidates=switch(False))
    ),
    "activation_checkpointing.contiguous_memory_optimization": _coarse(
        "switch",
        _checkpointing("CONTIGUOUS_CHECKPOINTING", when={"activation_checkpointing.partition_activations": (True,)}),
    ),
}


# Forms of the Adam that DeepSpeed makes by its configuration: its own kernels, or PyTorch's.

TORCH_ADAM = "optimizer.params.torch_adam"
_SOURCE = "engine.py get_optimizer_configuration"


def _makes_adam(here: Surroundings) -> bool:
    section = here.own("optimizer")
    named = str(section.get("type", "")) if isinstance(section, Mapping) else ""
    return named.lower() in ("adam", "adamw") and not here.program.optimizer


_OTHERWISE = "it takes an Adam or AdamW in the DeepSpeed configuration, and no optimizer of the code's"

ADAM: dict[str, KnownKnob] = {
    # DeepSpeed's kernels are built at their first use, and update in place.
    TORCH_ADAM: _coarse("switch", Effect(_SOURCE, holds=_makes_adam, otherwise=_OTHERWISE)),
    "optimizer.params.fused": _knob(
        "switch",
        # DeepSpeed's own Adam refuses the key.
        Effect(_SOURCE, when={TORCH_ADAM: (True,)}, holds=_makes_adam, otherwise=_OTHERWISE),
        word="fused",
    ),
}


# Settings of the engine itself: Python's garbage collector, and the passes of DeepCompile.

DEEPCOMPILE = "compile.deepcompile"
_NOT_COMPILED = "DeepCompile acts in code that calls engine.compile(), and yours does not"


def _of_deepcompile(key: str, **takes: Any) -> dict[str, KnownKnob]:
    # A setting that DeepCompile reads (arXiv 2504.09983).
    when: Mapping[str, tuple[Any, ...]] = {} if key == "deepcompile" else {DEEPCOMPILE: (True,)}
    source, stages = f"../compile/config.py {key}, engine.py get_deepcompile_backend", (1, 2, 3)
    # Either the code compiles the engine, or ZeroTune turns that on.
    by_code = _on_gpu(
        source, stages, when=when, holds=lambda here: here.program.compiles_engine, otherwise=_NOT_COMPILED
    )
    by_zerotune = replace(
        by_code, when={**when, path_of(COMPILE): (True,)}, holds=lambda here: COMPILE in here.program.turnable
    )
    return {f"compile.{key}": _coarse("switch", by_code, by_zerotune, **takes)}


ENGINE: dict[str, KnownKnob] = {
    # Cycles of objects then stay for the whole training. A trial is too short to see how much memory they come to.
    "disable_python_gc": _knob("switch", Effect("engine.py _configure_python_gc"), since="0.19.8", word="no-gc"),
    **_of_deepcompile("deepcompile", since="0.16.6"),
    **_of_deepcompile("free_activation", since="0.16.6"),
    **_of_deepcompile("offload_activation", since="0.16.6"),
    **_of_deepcompile("offload_opt_states", since="0.16.6"),
    **_of_deepcompile("offload_parameters", since="0.16.6"),
    **_of_deepcompile("double_buffer", since="0.16.6", default=True),
    **_of_deepcompile("symmetric_memory", since="0.16.6"),
}


# Number formats of arithmetic, states and communication.

_MASTER = "bf16.bf16_master_weights_and_grads"

PRECISION: dict[str, KnownKnob] = {
    "bf16.enabled": _coarse("switch", Effect("engine.py get_data_types")),
    "torch_autocast.enabled": _coarse("switch", Effect("torch_autocast.py autocast_if_enabled"), since="0.17.2"),
    "communication_data_type": _coarse(
        ("fp32", "fp16", "bf16"),
        Effect("engine.py allreduce_bucket", (0,), replicas=2),
        # Under autocast every parameter has its own type.
        Effect(f"{STAGE_1_2}, {STAGE_3} comm_dtypes", (1, 2, 3), replicas=2, when={"torch_autocast.enabled": (False,)}),
        default=None,
    ),
    _MASTER: _coarse(
        "switch",
        Effect("base_optimizer.py _configure_master_weights", (1, 2, 3), when={"bf16.enabled": (True,)}),
        changes_mathematics=True,
        since="0.18.3",
    ),
    "bf16.bf16_optimizer_states": _coarse(
        "switch",
        Effect(
            "base_optimizer.py _configure_master_weights", (1, 2, 3), when={"bf16.enabled": (True,), _MASTER: (True,)}
        ),
        changes_mathematics=True,
        since="0.18.3",
    ),
    "data_types.grad_accum_dtype": _coarse(
        ("fp32", "fp16", "bf16"),
        # Stage 0 takes the model's own type only: engine.py _do_optimizer_sanity_check.
        Effect(f"{STAGE_1_2}, {STAGE_3} gradient_accumulation_dtype", (1, 2, 3)),
        default=None,
        changes_mathematics=True,
    ),
}


KNOBS: dict[str, KnownKnob] = {
    **OFFLOAD,
    **REDUCTION,
    **PARTITIONED_PARAMETERS,
    **ZERO_PLUS_PLUS,
    **PRECISION,
    **ACTIVATIONS,
    **ENGINE,
    **LAYOUT,
    **ADAM,
}

INTERACTING = frozenset(
    frozenset(f"zero_optimization.{key}" for key in keys)
    for keys in (
        ("overlap_comm", "reduce_bucket_size"),  # a bucket is reduced while the next one fills
        ("contiguous_gradients", "reduce_bucket_size"),  # the copies go into the bucket
        ("contiguous_gradients", "reduce_scatter"),  # zero/stage_1_and_2.py average_tensor
        ("stage3_prefetch_bucket_size", "stage3_max_live_parameters"),  # fetch_sub_module prefetches what may live
        ("stage3_prefetch_bucket_size", "overlap_comm"),
        ("offload_optimizer.ratio", "sub_group_size"),  # subgroup_to_device divides by sub-groups
        ("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"),
    )
)
"""Pairs of fine knobs of which one decides what the other does."""

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

# Sections that DeepSpeed hands to the optimizer, the scheduler and the loss scaling as they are.
_ALWAYS_READ = {"fp16", "gradient_clipping", "optimizer", "scheduler"}

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


def is_known(path: str) -> bool:
    """Returns whether a setting is known to have an effect in some candidate."""
    return path in KNOBS or path == STAGE or path.partition(".")[0] in _ALWAYS_READ


def catalogues_name(path: str) -> str:
    return STAGE_3_NAMES.get(path, path)


def spelled(path: str, base_config: Mapping[str, Any]) -> str:
    """Returns the name of a setting in the user's configuration. DeepSpeed refuses both names side by side."""
    for short, name in STAGE_3_NAMES.items():
        if path in (short, name):
            return name if get_knob(base_config, short) is None else short
    return path
