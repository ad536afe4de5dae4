"""The settings of a DeepSpeed configuration that decide the memory of a rank, with DeepSpeed's defaults."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import AUTOTP, SEQUENCE, Layout
from zerotune.trial_lib.deepspeed_config.overrides import adds_up_in_32_bits, is_bf16_with_32_bit_sums
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.switches import deepspeed_part, switch_key
from zerotune.trial_lib.search.catalogue import KNOBS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, is_coarse
from zerotune.trial_lib.search.effects import Effect
from zerotune.trial_lib.search.knobs import STAGE, get_knob, leaves

# The memory of a model's states, and a first guess of the largest micro-batch beside them.

GRADIENT_BYTES = MASTER_BYTES = STATE_BYTES = 4
_ADAM_STATES = 2


@dataclass(frozen=True)
class Precision:
    """The precision of a model's parameters, and of what its optimizer keeps for them."""

    bytes_per_param: int  # bytes of one parameter of the running model
    master_copies: bool  # whether the optimizer holds another copy of each trainable parameter
    master_bytes: int = MASTER_BYTES  # bytes of a parameter of that copy
    gradient_bytes: int = GRADIENT_BYTES  # bytes of a gradient in the sum over micro-batches
    state_bytes: int = STATE_BYTES  # bytes of each number that the optimizer keeps for a parameter, such as Adam's two
    sums_apart: bool = False  # whether the sums of all gradients are there beside the gradients of the backward pass


FULL = Precision(bytes_per_param=4, master_copies=False)
HALF = Precision(bytes_per_param=2, master_copies=True, gradient_bytes=2)


def precision_of(ds_config: Mapping[str, Any], bytes_per_param: int | None) -> Precision:
    """Returns the precision of a DeepSpeed configuration, or that of the code if the configuration has none. fp16 and
    bf16 (also under its older name `bfloat16`) are 16-bit if they are enabled. "auto" counts as not enabled, because
    only the user's code can resolve it. ZeRO can keep master copies and optimizer states in 16 bits, and add up
    gradients in 32.
    """
    fp16, bf16, older = (_section(ds_config, name) for name in ("fp16", "bf16", "bfloat16"))
    bf16 = bf16 or older
    if fp16.get("enabled") is True or bf16.get("enabled") is True:
        precision = HALF
    else:
        precision = FULL if bytes_per_param is None else Precision(bytes_per_param, master_copies=False)
    zero = _section(ds_config, "zero_optimization")
    if zero.get("stage") not in (1, 2, 3):
        return precision
    if adds_up_in_32_bits(ds_config):
        precision = replace(precision, gradient_bytes=GRADIENT_BYTES)
    offloads = _section(zero, "offload_optimizer").get("device") in ("cpu", "nvme")
    if is_bf16_with_32_bit_sums(ds_config) and zero["stage"] == 1 and not offloads:
        # `BF16_Optimizer` knows no 16-bit copies.
        return replace(precision, sums_apart=True)
    # These act whether their section is enabled or not.
    masters = fp16.get("fp16_master_weights_and_grads") is True or bf16.get("bf16_master_weights_and_grads") is True
    states = masters and bf16.get("bf16_optimizer_states") is True
    return replace(precision, master_bytes=2 if masters else MASTER_BYTES, state_bytes=2 if states else STATE_BYTES)


def on_a_device(
    profile: ModelProfile, slots: int, layout: Layout | None = None, profiled: Layout | None = None
) -> tuple[ModelProfile, float]:
    """Returns the part of a model on one device, and the number of devices that ZeRO partitions it over. A stage of a
    pipeline has its share of the parameters. Layers may differ, so it is the mean. Tensor parallelism divides the
    linear layers, and each device has all other parameters. Under Ulysses each device has all parameters, and ZeRO
    partitions over all of its ranks. Experts are divided over their groups, and ZeRO partitions those of a device over
    the groups. So the number of devices is no whole one.
    """
    profiled = profiled or Layout()
    layout = layout or profiled
    depth = pipeline_depth(profile, slots, layout, profiled)
    share = 1 - 1 / layout.tensor
    whole = max(1, profile.num_params)
    kept = whole - (profile.linear_params * share if layout.tensor > 1 else 0)
    # The devices that experts are divided over. If no switch sets them, the profile trial shows them.
    expert_ranks = max(1, profile.expert_ranks * layout.expert // profiled.expert)
    elsewhere = profile.expert_params * (1 - 1 / expert_ranks)
    kept -= elsewhere
    # The devices that ZeRO partitions over have the experts of all groups together.
    of_groups = kept / max(1.0, kept + elsewhere)
    own = replace(
        profile,
        num_params=ceil(profile.num_params * kept / whole / depth),
        trainable_num_params=ceil(profile.trainable_num_params * kept / whole / depth),
    )
    return own, max(1.0, slots // (layout.tensor * depth) * of_groups)


def pipeline_depth(profile: ModelProfile, slots: int, layout: Layout, profiled: Layout) -> int:
    """Returns a pipeline's stages; 1 without one. If no switch sets them, the profile trial's replicas show them."""
    stages = profiled.pipeline
    if profile.pipeline_parallel:
        stages = max(1, slots // (profile.data_parallel_size * profiled.tensor * profiled.sequence))
    return max(1, stages * layout.pipeline // profiled.pipeline)


def activation_share(tensor_parallel: int) -> float:
    """Returns the part of a layer's activations that a device keeps under tensor parallelism. Of 34 bytes for each
    number of a layer's input, 10 are of norms and dropout, which each device has. 24 are of linear layers and
    attention, which are divided (Korthikanti et al., arXiv 2205.05198, section 4.2.1). The matrix of the attention
    itself is left out, because fused kernels do not keep it.
    """
    return (10 + 24 / tensor_parallel) / 34


def state_bytes(stage: int, num_params: int, trainable_num_params: int, precision: Precision, slots: float) -> int:
    """Returns the bytes of parameters, gradients and Adam's states on one device, without activations. Stage 1
    partitions the optimizer's states over the slots, 2 also the gradients, 3 also the parameters.
    """
    params = num_params * precision.bytes_per_param
    # dsat counts 32-bit gradients, as the optimizer's update takes them.
    gradients = trainable_num_params * max(precision.gradient_bytes, precision.master_bytes)
    masters = precision.master_bytes if precision.master_copies else 0
    optimizer = trainable_num_params * (_ADAM_STATES * precision.state_bytes + masters)
    by_stage = (
        params + gradients + optimizer,
        params + gradients + optimizer / slots,
        params + (gradients + optimizer) / slots,
        (params + gradients + optimizer) / slots,
    )
    return ceil(by_stage[stage])


def first_guess(stage: int, profile: ModelProfile, precision: Precision, slots: int) -> int:
    """Returns a first guess of the largest micro-batch (samples) that fits on a device. It is the memory beside the
    states, divided by the activations of one sample. It is at least 1, which ran in the profile trial, and 1 if the
    profile has no activations.
    """
    if profile.activation_mem_per_gpu <= 0:
        return 1
    own, shards = on_a_device(profile, slots)
    states = state_bytes(stage, own.num_params, own.trainable_num_params, precision, shards)
    return max(1, (profile.gpu_mem - states) // profile.activation_mem_per_gpu)


# Defaults of deepspeed/runtime/zero/config.py (0.19.8).
_BUCKET = 500_000_000
_LIVE = _REUSE = _SUB_GROUP = 1_000_000_000

_STATE_BYTES = {"adagrad": 4, "lion": 4, "fusedlion": 4, "muon": 4}
ADAM_STATE_BYTES = 8

ArmKey = tuple[tuple[str, object], ...]
"""The settings of an arm, by name. None of them stands there twice."""

# Coarse settings that the settings below have, whatever their spelling.
_IN_SETTINGS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", AUTOTP, SEQUENCE)
# Coarse sections that change the result of a training. Of their settings these alone change its memory or its time.
_MATHEMATICS = ("fp16", "gradient_clipping", "optimizer", "scheduler")
_NOT_MATHEMATICS_ALONE = ("fp16.fp16_master_weights_and_grads", "optimizer.type")


@dataclass(frozen=True)
class ZeroSettings:
    """The memory settings of one configuration."""

    stage: int  # the ZeRO stage
    offload_optimizer: str  # the place of the optimizer's states: `none` for the device, else `cpu` or `nvme`
    offload_param: str  # the place of parameters that are not needed. `none` below stage 3, which ignores it.
    precision: Precision  # of the parameters
    optimizer_bytes: int  # bytes of the optimizer's states for one trainable parameter, without master copies
    torch_adam: bool  # whether it is PyTorch's Adam, which does not update in place as DeepSpeed's kernels do
    reduce_bucket_size: int  # elements of a gradient bucket
    overlap_comm: bool  # whether two such buckets take turns
    contiguous_gradients: bool  # whether gradients are copied into the bucket
    max_live_parameters: int  # the most parameters that stage 3 keeps gathered
    sub_group_size: int  # parameters that stage 3 updates at a time
    layout: Layout = field(default_factory=Layout)  # how the ranks share a replica of the model

    @classmethod
    def of(cls, ds_config: Mapping[str, Any], bytes_per_param: int | None = None) -> "ZeroSettings":
        """Returns the settings of a complete configuration. "auto" counts as absent."""
        zero, optimizer = _section(ds_config, "zero_optimization"), _section(ds_config, "optimizer")
        stage = _number(zero, "stage", 0)
        precision = precision_of(ds_config, bytes_per_param)
        return cls(
            stage=stage,
            offload_optimizer=_offload(zero, "offload_optimizer") if stage >= 1 else "none",
            offload_param=_offload(zero, "offload_param") if stage == 3 else "none",
            precision=precision,
            optimizer_bytes=_optimizer_bytes(optimizer) * precision.state_bytes // STATE_BYTES,
            torch_adam=_is_torch_adam(optimizer),
            reduce_bucket_size=_number(zero, "reduce_bucket_size", _BUCKET),
            overlap_comm=bool(_get(zero, "overlap_comm", stage == 3)),
            contiguous_gradients=bool(_get(zero, "contiguous_gradients", True)),
            # A parameter is freed if it is not needed soon, or if there is no room for it.
            max_live_parameters=min(
                _number_of_stage_3(zero, "max_live_parameters", _LIVE),
                _number_of_stage_3(zero, "max_reuse_distance", _REUSE),
            ),
            sub_group_size=_number(zero, "sub_group_size", _SUB_GROUP),
            layout=Layout.of(ds_config),
        )


def arm_key(ds_config: Mapping[str, Any], switches: Collection[str] | None = None) -> ArmKey:
    """Returns the coarse settings of memory and time, which all configurations of one arm have in common. Settings that
    change the result of a training alone are not among them, such as a learning rate. The switches are the places of
    those that make an arm; None for all that the configuration has.
    """
    settings = ZeroSettings.of(ds_config)
    return (
        ("stage", settings.stage),
        ("offload_optimizer", settings.offload_optimizer),
        ("offload_param", settings.offload_param),
        ("precision", settings.precision),
        ("optimizer_bytes", settings.optimizer_bytes),
        ("layout", settings.layout),
        *_other_coarse(ds_config, settings),
        *switch_key(ds_config, switches),
    )


def different_settings(one: ArmKey, other: ArmKey) -> int:
    """Returns the number of settings in which two arms differ, beside the ZeRO stage."""
    return len({name for name, _ in set(one) ^ set(other)} - {"stage"})


def _other_coarse(ds_config: Mapping[str, Any], settings: ZeroSettings) -> Iterator[tuple[str, object]]:
    for path, value in sorted(leaves(deepspeed_part(ds_config))):
        if value is None or value == "auto" or not is_coarse(path) or path in (STAGE, *_IN_SETTINGS, *_OFFLOADS):
            continue
        known = KNOBS.get(path)
        if known is None:
            if path in _NOT_MATHEMATICS_ALONE or path.partition(".")[0] not in _MATHEMATICS:
                yield path, str(value).lower()
        elif value != known.default and any(_acts(effect, ds_config, settings) for effect in known.effects):
            yield path, repr(value)


def _acts(effect: Effect, ds_config: Mapping[str, Any], settings: ZeroSettings) -> bool:
    return settings.stage in effect.stages and all(
        _value_of(path, ds_config, settings) in values for path, values in effect.when.items()
    )


def _value_of(path: str, ds_config: Mapping[str, Any], settings: ZeroSettings) -> Any:
    if path in _OFFLOADS:
        return _OFFLOADS[path](settings)
    known = KNOBS.get(path)
    return _get({path: get_knob(ds_config, path)}, path, None if known is None else known.default)


def arm_label(ds_config: Mapping[str, Any]) -> str:
    """Returns the label of an arm, such as `z3-offload-optimizer`, without finer differences."""
    settings = ZeroSettings.of(ds_config)
    stage = _get(_section(ds_config, "zero_optimization"), "stage", 0)
    offloads = {"optimizer": settings.offload_optimizer, "param": settings.offload_param}
    # A report may be of a configuration that DeepSpeed refuses.
    named = f"z{settings.stage}" if isinstance(stage, (int, str, float)) else "z?"
    return named + "".join(f"-offload-{what}" for what, where in offloads.items() if where != "none")


_OFFLOADS: Mapping[str, Callable[[ZeroSettings], str]] = {
    OFFLOAD_OPTIMIZER: lambda settings: settings.offload_optimizer,
    OFFLOAD_PARAM: lambda settings: settings.offload_param,
}


def _get(section: Mapping[str, Any], key: str, default: Any) -> Any:
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    # A section; an empty one for a value that DeepSpeed refuses there. Such a study has a report too.
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    # A number, which DeepSpeed also takes as a text; the default for anything else, and beyond 64 bits.
    try:
        number = int(_get(section, key, default))
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 2**63 else default


def _number_of_stage_3(zero: Mapping[str, Any], key: str, default: int) -> int:
    # A number of stage 3, by its documented name or by its name without the stage.
    return _number(zero, f"stage3_{key}", _number(zero, key, default))


def _offload(zero: Mapping[str, Any], key: str) -> str:
    return str(_get(_section(zero, key), "device", "none"))


def _optimizer_bytes(optimizer: Mapping[str, Any]) -> int:
    # The bytes of one parameter's states in 32 bits. They are Adam's if the code makes the optimizer.
    name = str(optimizer.get("type", "")).lower()
    if name == "sgd":
        return 4 if _get(_section(optimizer, "params"), "momentum", 0) else 0
    return _STATE_BYTES.get(name, ADAM_STATE_BYTES)


def _is_torch_adam(optimizer: Mapping[str, Any]) -> bool:
    name = str(optimizer.get("type", "")).lower()
    return not name or (name in ("adam", "adamw") and _get(_section(optimizer, "params"), "torch_adam", False) is True)
