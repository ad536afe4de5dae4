"""The memory that a model's states take under ZeRO, and the first guess of the largest micro-batch beside them.

The formulas are those of dsat, after ZeRO (arXiv 1910.02054), with two faults mended: bf16 is sized
as the 16-bit format it is, and the memory of activations is counted once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from trial_lib.records.result import ModelProfile

GRADIENT_BYTES = 4
ADAM_BYTES = 8
MASTER_BYTES = 4


@dataclass(frozen=True)
class Precision:
    """How a model's parameters are held.

    Attributes:
        bytes_per_param: bytes of one parameter of the model that runs.
        master_copies: whether the configuration has the optimizer hold another, 32-bit copy of each trainable
            parameter.
    """

    bytes_per_param: int
    master_copies: bool

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient that ZeRO adds up and reduces: 32 bits, unless the configuration says 16."""
        return self.bytes_per_param if self.master_copies else MASTER_BYTES


FULL = Precision(bytes_per_param=4, master_copies=False)
HALF = Precision(bytes_per_param=2, master_copies=True)


def precision_of(ds_config: Mapping[str, Any], bytes_per_param: int | None) -> Precision:
    """Returns the precision that a DeepSpeed configuration asks for, or else that the code has given the model.

    fp16 and bf16 (also under its older name `bfloat16`) are 16-bit where they are enabled; "auto", which only the
    user's code can resolve, counts as not enabled.

    Args:
        ds_config: a complete configuration.
        bytes_per_param: as `ModelProfile` has it.
    """
    sections = (ds_config.get(name, {}) for name in ("fp16", "bf16", "bfloat16"))
    if any(section.get("enabled") is True for section in sections):
        return HALF
    return FULL if bytes_per_param is None else Precision(bytes_per_param, master_copies=False)


def on_a_device(profile: ModelProfile, slots: int) -> tuple[ModelProfile, int]:
    """Returns what of a model one device has, and the number of devices over which ZeRO partitions that.

    A stage of a pipeline has its share of the parameters (layers may differ: it is the mean), and ZeRO partitions them
    over the pipeline's replicas.

    Args:
        profile: of the whole model.
        slots: devices of a trial.
    """
    if not profile.pipeline_parallel:
        return profile, slots
    depth = max(1, slots // profile.data_parallel_size)
    own = {
        "num_params": ceil(profile.num_params / depth),
        "trainable_num_params": ceil(profile.trainable_num_params / depth),
    }
    return profile.model_copy(update=own), profile.data_parallel_size


def state_bytes(stage: int, num_params: int, trainable_num_params: int, precision: Precision, slots: int) -> int:
    """Returns the bytes of parameters, gradients and Adam's states on one device, without activations.

    Args:
        stage: the ZeRO stage, 0 to 3: 1 partitions the optimizer's states, 2 the gradients too, 3 the parameters too.
        num_params: parameters of the model, or of a pipeline's stage.
        trainable_num_params: those that have gradients and optimizer states.
        precision: how the parameters are held.
        slots: devices over which the states are partitioned.
    """
    params = num_params * precision.bytes_per_param
    gradients = trainable_num_params * GRADIENT_BYTES
    optimizer = trainable_num_params * (ADAM_BYTES + (MASTER_BYTES if precision.master_copies else 0))
    by_stage = (
        params + gradients + optimizer,
        params + gradients + optimizer / slots,
        params + (gradients + optimizer) / slots,
        (params + gradients + optimizer) / slots,
    )
    return ceil(by_stage[stage])


def first_guess(stage: int, profile: ModelProfile, precision: Precision, slots: int) -> int:
    """Returns the first guess of the largest micro-batch (samples) that fits on a device.

    It is the memory that the states leave, over the activations of one sample; at least 1, which the profile trial has
    shown to run. A profile that saw no activations gives nothing to divide by: 1 again.
    """
    if profile.activation_mem_per_gpu <= 0:
        return 1
    own, shards = on_a_device(profile, slots)
    states = state_bytes(stage, own.num_params, own.trainable_num_params, precision, shards)
    return max(1, (profile.gpu_mem - states) // profile.activation_mem_per_gpu)
