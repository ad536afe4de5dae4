"""The memory of a model's states under ZeRO, and a first guess of the largest micro-batch beside them.

The formulas are those of dsat, after ZeRO (arXiv 1910.02054), with two faults corrected: bf16 counts as a 16-bit
format, and the memory of activations counts once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from trial_lib.deepspeed_config.gradient_sums import adds_up_in_32_bits, is_bf16_with_32_bit_sums
from trial_lib.deepspeed_config.layout import Layout
from trial_lib.records.result import ModelProfile

GRADIENT_BYTES = MASTER_BYTES = STATE_BYTES = 4
_ADAM_STATES = 2


@dataclass(frozen=True)
class Precision:
    """The precision of a model's parameters, and of what its optimizer keeps for them.

    Attributes:
        bytes_per_param: bytes of one parameter of the running model.
        master_copies: whether the optimizer holds another copy of each trainable parameter.
        master_bytes: bytes of a parameter of that copy.
        gradient_bytes: bytes of a gradient in the sum over micro-batches.
        state_bytes: bytes of each number that the optimizer keeps for a parameter, such as Adam's two.
        sums_apart: whether the sums of all gradients are there beside the gradients of the backward pass.
    """

    bytes_per_param: int
    master_copies: bool
    master_bytes: int = MASTER_BYTES
    gradient_bytes: int = GRADIENT_BYTES
    state_bytes: int = STATE_BYTES
    sums_apart: bool = False


FULL = Precision(bytes_per_param=4, master_copies=False)
HALF = Precision(bytes_per_param=2, master_copies=True, gradient_bytes=2)


def precision_of(ds_config: Mapping[str, Any], bytes_per_param: int | None) -> Precision:
    """Returns the precision of a DeepSpeed configuration, or that of the code if the configuration has none.

    fp16 and bf16 (also under its older name `bfloat16`) are 16-bit if they are enabled. "auto" counts as not enabled,
    because only the user's code can resolve it. ZeRO can keep master copies and optimizer states in 16 bits, and add
    up gradients in 32.

    Args:
        ds_config: a complete configuration.
        bytes_per_param: as in `ModelProfile`.
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


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def on_a_device(
    profile: ModelProfile, slots: int, layout: Layout | None = None, profiled: Layout | None = None
) -> tuple[ModelProfile, float]:
    """Returns the part of a model on one device, and the number of devices that ZeRO partitions it over.

    A stage of a pipeline has its share of the parameters. Layers may differ, so it is the mean. Tensor parallelism
    divides the linear layers, and each device has all other parameters. Under Ulysses each device has all parameters,
    and ZeRO partitions over all of its ranks. Experts are divided over their groups, and ZeRO partitions those of a
    device over the groups. So the number of devices is no whole one.

    Args:
        profile: of the whole model.
        slots: devices of a trial.
        layout: of the configuration; None for the profile trial's.
        profiled: the profile trial's, as far as the settings say so; None for none.
    """
    profiled = profiled or Layout()
    layout = layout or profiled
    depth = pipeline_depth(profile, slots, layout, profiled)
    share = 1 - 1 / layout.tensor
    whole = max(1, profile.num_params)
    kept = whole - (profile.linear_params * share if layout.tensor > 1 else 0)
    elsewhere = profile.expert_params * (1 - 1 / _expert_ranks(profile, layout, profiled))
    kept -= elsewhere
    # The devices that ZeRO partitions over have the experts of all groups together.
    of_groups = kept / max(1.0, kept + elsewhere)
    own = {
        "num_params": ceil(profile.num_params * kept / whole / depth),
        "trainable_num_params": ceil(profile.trainable_num_params * kept / whole / depth),
    }
    return profile.model_copy(update=own), max(1.0, slots // (layout.tensor * depth) * of_groups)


def _expert_ranks(profile: ModelProfile, layout: Layout, profiled: Layout) -> int:
    """Returns the devices that experts are divided over. If no switch sets them, the profile trial shows them."""
    return max(1, profile.expert_ranks * layout.expert // profiled.expert)


def pipeline_depth(profile: ModelProfile, slots: int, layout: Layout, profiled: Layout) -> int:
    """Returns the stages of a configuration's pipeline; 1 without one.

    Args: as for `on_a_device`. If no switch sets the stages, the profile trial's replicas show them.
    """
    stages = profiled.pipeline
    if profile.pipeline_parallel:
        stages = max(1, slots // (profile.data_parallel_size * profiled.tensor * profiled.sequence))
    return max(1, stages * layout.pipeline // profiled.pipeline)


def activation_share(tensor_parallel: int) -> float:
    """Returns the part of a layer's activations that a device keeps under tensor parallelism.

    Of 34 bytes for each number of a layer's input, 10 are of norms and dropout, which each device has. 24 are of linear
    layers and attention, which are divided (Korthikanti et al., arXiv 2205.05198, section 4.2.1). The matrix of the
    attention itself is left out, because fused kernels do not keep it.
    """
    return (10 + 24 / tensor_parallel) / 34


def state_bytes(stage: int, num_params: int, trainable_num_params: int, precision: Precision, slots: float) -> int:
    """Returns the bytes of parameters, gradients and Adam's states on one device, without activations.

    Args:
        stage: the ZeRO stage. Stage 1 partitions the optimizer's states, 2 also the gradients, 3 also the parameters.
        num_params: parameters of the model, or of a pipeline's stage.
        trainable_num_params: those with gradients and optimizer states.
        precision: of the parameters.
        slots: devices that the states are partitioned over.
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
    """Returns a first guess of the largest micro-batch (samples) that fits on a device.

    It is the memory beside the states, divided by the activations of one sample. It is at least 1, which ran in the
    profile trial, and 1 if the profile has no activations.
    """
    if profile.activation_mem_per_gpu <= 0:
        return 1
    own, shards = on_a_device(profile, slots)
    states = state_bytes(stage, own.num_params, own.trainable_num_params, precision, shards)
    return max(1, (profile.gpu_mem - states) // profile.activation_mem_per_gpu)
