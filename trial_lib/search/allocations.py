"""DeepSpeed's allocations on a device, with their sizes and times: the analytic part of the memory model.

Read from DeepSpeed 0.19.8 (`deepspeed/runtime`): `engine.py` for stage 0, `zero/stage_1_and_2.py` for stages 1 and 2,
`zero/stage3.py` with `zero/partitioned_param_coordinator.py` for stage 3. Sizes that depend on the layers of a model,
such as its largest parameter, are not known. Measured peaks cover them.
"""

from dataclasses import dataclass, replace

from trial_lib.records.result import ModelProfile
from trial_lib.search.zero_settings import (
    MASTER_BYTES,
    STATE_BYTES,
    ZeroSettings,
    activation_share,
    on_a_device,
    pipeline_depth,
)

# `engine.buffered_allreduce_fallback`: elements that stage 0 flattens at a time.
_ALLREDUCE_ELEMENTS = 500_000_000
# Bytes for each parameter of a tensor that PyTorch's Adam needs to update it. On a CPU these are a square root and a
# divisor. On CUDA, where all tensors are updated at once, it is the root alone (torch/optim/adam.py, 2.13).
_ADAM_UPDATE_BYTES = {"cpu": 8, "cuda": 4}
# The memory of reducing gradients, in flat copies of them (`allreduce_bucket`, `reduce_scatter_coalesced`). On a CPU
# the collective adds pieces of its own. By the recorded tables they are half as much again.
_FLAT_COPIES = {"cpu": 1.5, "cuda": 1.0}


@dataclass(frozen=True)
class Allocations:
    """Bytes on one device. A CPU's memory limit counts an allocation when it is made, and a peak counts written memory.
    On CUDA the two are the same.
    """

    initialize: float  # allocated when `deepspeed.initialize` returns
    states: float  # added and kept by the first steps: optimizer states, and gradients until the optimizer's step
    buffers: float  # buckets, gathered parameters, flat copies of gradients, temporaries of the update
    activations: float  # kept by the forward pass for the backward pass
    # Counted by the limit in the steps beyond the memory that they write. Negative if they write to memory that
    # initialisation has allocated.
    limit_correction: float = 0.0
    early_buffers: float = 0.0  # the buckets in `initialize`
    late_states: float = 0.0  # the part of `states` that grows while the activations shrink: gradients
    late_buffers: float = 0.0  # the part that exists after the activations: flat copies, temporaries of the update
    passing_buffers: float = 0.0  # the part of `buffers` that is freed with the activations: gathered parameters
    # The part of `activations` that the program still refers to at the optimizer's update, such as the outputs of the
    # model. The formulas know of none.
    kept_activations: float = 0.0

    @property
    def all_states(self) -> float:
        """Parameters, gradients and optimizer states, whenever they are allocated."""
        return self.initialize - self.early_buffers + self.states


@dataclass(frozen=True)
class _Case:
    """One configuration of one model, from which the sizes of all stages follow, in elements. Three sizes are in bytes:
    `size` of a parameter in the model's precision, `gradient_size` of a gradient that ZeRO adds up, and `master` of a
    parameter in the optimizer's copy. The update takes the gradient in that format too.
    """

    settings: ZeroSettings
    total: int
    trainable: int
    shards: float
    size: int
    gradient_size: int
    master: int
    on_cpu: bool

    @property
    def share(self) -> float:
        """Trainable elements of one device if ZeRO partitions them."""
        return self.trainable / self.shards

    @property
    def states_here(self) -> bool:
        """Whether the optimizer's states are in the device's memory. On a CPU they are, offloaded or not."""
        return self.on_cpu or self.settings.offload_optimizer == "none"

    def update(self, elements: float) -> float:
        """The memory of the optimizer's update beside states and gradients, if it updates so many elements at once."""
        per_element = _ADAM_UPDATE_BYTES["cpu" if self.on_cpu else "cuda"] * self.master / MASTER_BYTES
        return elements * per_element if self.settings.torch_adam and self.states_here else 0.0

    def bucket(self, buffers: int) -> tuple[float, float]:
        """Returns the bytes of the gradient buckets: allocated, and written."""
        elements = buffers * self.settings.reduce_bucket_size
        # A backward pass copies each gradient once, and changes to the other bucket when one is full.
        written = min(elements, self.trainable) if self.on_cpu else elements
        # Stage 2 takes the gradients unchanged, and adds up the reduced ones.
        size = self.size if self.settings.stage == 2 else self.reduced_size
        return elements * size, written * size

    @property
    def reduced_size(self) -> int:
        """Bytes of a gradient that is reduced: in the format of sums that are apart, else in the model's own."""
        precision = self.settings.precision
        return self.size if precision.master_copies and not precision.sums_apart else self.gradient_size

    def reduction(self, elements: int | None = None) -> float:
        """The memory of reducing gradients beside these and their buckets; by default of a bucket at a time."""
        copies = _FLAT_COPIES["cpu" if self.on_cpu else "cuda"]
        a_bucket = min(self.settings.reduce_bucket_size, self.trainable)
        return copies * (a_bucket if elements is None else elements) * self.reduced_size


def allocations(
    settings: ZeroSettings,
    profiled: ZeroSettings,
    profile: ModelProfile,
    slots: int,
    device: str,
    micro_batch_size: int,
    accumulation: int = 1,
) -> Allocations:
    """Returns the allocations of one configuration. `profiled` is the configuration of the profile trial, whose
    activations are known. On a CPU "offloaded" states are in the same memory. A stage of a pipeline may keep several
    micro-batches of an accumulation at a time.
    """
    own, shards = on_a_device(profile, slots, settings.layout, profiled.layout)
    case = _Case(
        settings=settings,
        total=own.num_params,
        trainable=own.trainable_num_params,
        shards=shards,
        size=settings.precision.bytes_per_param,
        gradient_size=settings.precision.gradient_bytes,
        master=settings.precision.master_bytes,
        on_cpu=device == "cpu",
    )
    by_stage = (_plain, _partitioned_states, _partitioned_states, _partitioned_parameters)[
        min(max(settings.stage, 0), 3)
    ]
    if settings.precision.sums_apart:
        by_stage = _sums_apart
    ratio = _activation_ratio(settings, profiled)
    if settings.layout.pipeline != 1 or profiled.layout.pipeline != 1:
        # deepspeed/runtime/pipe/schedule.py `TrainSchedule`: the first stage is as many micro-batches ahead of the
        # last as there are stages. The profile has the activations of one micro-batch in its own stages.
        depth, then = (pipeline_depth(profile, slots, each.layout, profiled.layout) for each in (settings, profiled))
        ratio *= then / depth * min(depth, accumulation)
    activations = micro_batch_size * profile.activation_mem_per_gpu * ratio
    return replace(by_stage(case), activations=activations)


def _activation_ratio(settings: ZeroSettings, profiled: ZeroSettings) -> float:
    # The activations of a configuration divided by the profiled ones. 16-bit ones take about half.
    size, profiled_size = settings.precision.bytes_per_param, profiled.precision.bytes_per_param
    by_format = 1.0 if size == profiled_size else 0.5 if size < profiled_size else 2.0
    of_tensors = activation_share(settings.layout.tensor) / activation_share(profiled.layout.tensor)
    # Each rank has its part of the tokens of a sample.
    return by_format * of_tensors * profiled.layout.sequence / settings.layout.sequence


def _plain(case: _Case) -> Allocations:
    # Stage 0: nothing is partitioned. Gradients are reduced in flat copies, and the first step makes the states.
    has_master = case.settings.precision.master_copies
    master = case.master if has_master else 0
    # Without it PyTorch keeps the states as wide as the parameters.
    states = case.settings.optimizer_bytes * (1 if has_master else case.size / STATE_BYTES)
    flat = case.reduction(min(case.trainable, _ALLREDUCE_ELEMENTS)) if case.shards > 1 else 0.0
    # On a CPU the update runs tensor by tensor. The largest tensor's size is unknown, so it is not counted.
    buffers = flat + (0.0 if case.on_cpu else case.update(case.trainable))
    return Allocations(
        initialize=case.total * case.size + case.trainable * master,
        states=case.trainable * (case.size + states),
        buffers=buffers,
        activations=0,
        late_states=case.trainable * case.size,
        late_buffers=buffers,
    )


def _partitioned_states(case: _Case) -> Allocations:
    # Stages 1 and 2: a copy of each rank's share is made at once, in 32-bit training too.
    settings, share, size = case.settings, case.share, case.size
    initialize = case.total * size + (share * case.master if case.states_here else 0)
    if case.on_cpu and settings.offload_optimizer != "none":
        # The buffers of the offload: gradients of the share, and its parameters in the model's own precision.
        initialize += share * (case.master + size)
    # Stage 1 keeps every gradient until the optimizer's step, stage 2 those of its share.
    kept = case.trainable if settings.stage == 1 else share if case.states_here else 0
    # Offload copies gradients into the bucket, whatever the value of `contiguous_gradients`.
    has_bucket = settings.contiguous_gradients or settings.offload_optimizer != "none"
    buffers = (2 if settings.overlap_comm else 1) if has_bucket else 0
    allocated, written = case.bucket(buffers)
    late = (share * case.master if case.states_here else 0) + case.update(share) + case.reduction()
    return Allocations(
        initialize=initialize,
        states=kept * case.gradient_size + (share * settings.optimizer_bytes if case.states_here else 0),
        buffers=written + late,
        activations=0,
        limit_correction=allocated - written,
        late_states=kept * case.gradient_size,
        late_buffers=late,
    )


def _sums_apart(case: _Case) -> Allocations:
    # Stage 1 by `BF16_Optimizer`: 32-bit sums of all gradients from the beginning, and no buckets.
    sums = case.trainable * case.gradient_size
    # On a CPU the steps write them first.
    filled = sums if case.on_cpu else 0
    flat = case.reduction(min(case.trainable, _ALLREDUCE_ELEMENTS)) if case.shards > 1 else 0.0
    late = flat + case.update(case.share)
    gradients = case.trainable * case.size
    return Allocations(
        initialize=case.total * case.size + case.share * case.master + sums,
        states=gradients + case.share * case.settings.optimizer_bytes,
        buffers=late + filled,
        activations=0,
        limit_correction=-filled,
        late_states=gradients,
        late_buffers=late + filled,
    )


def _partitioned_parameters(case: _Case) -> Allocations:
    # Stage 3: bucket and gradients are allocated at once. Parameters are gathered when they are needed.
    settings, share, size = case.settings, case.share, case.size
    params_here = case.on_cpu or settings.offload_param == "none"
    parameters = case.total / case.shards * size if params_here else 0
    # 32-bit parameters were to be their own copy. But DeepSpeed compares a device with its name (`zero/stage3.py`
    # `_create_fp32_partitions`), and so copies them too.
    master = share * case.master if case.states_here else 0
    gradients = share * case.gradient_size if case.states_here else 0
    allocated, written = case.bucket(1) if settings.contiguous_gradients else (0.0, 0.0)
    # Memory that exists from the beginning, and that the steps write first.
    late = written + gradients if case.on_cpu else 0.0
    # Parameters that are gathered ahead count among them (`PartitionedParameterCoordinator.fetch_sub_module`).
    gathered = min(case.total, settings.max_live_parameters)
    last = case.update(min(share, settings.sub_group_size)) + case.reduction()
    return Allocations(
        initialize=parameters + master + gradients + allocated,
        states=share * settings.optimizer_bytes if case.states_here else 0,
        buffers=gathered * size + late + last,
        activations=0,
        limit_correction=-late,
        early_buffers=allocated,
        late_buffers=last,
        passing_buffers=gathered * size,
    )
