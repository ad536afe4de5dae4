"""What a rank allocates on its device and its host: by DeepSpeed's code, or as a simulated run has found it.

The formulas are read from DeepSpeed 0.19.8 (`deepspeed/runtime`): `engine.py` for stage 0, `zero/stage_1_and_2.py` for
stages 1 and 2, `zero/stage3.py` with `zero/partitioned_param_coordinator.py` for stage 3. Sizes that depend on the
layers of a model, such as its largest parameter, are not known. Measured peaks cover them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from statistics import fmean
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import Layout
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.switches import switches_of
from zerotune.trial_lib.search.knobs import get_knob
from zerotune.trial_lib.search.zero_settings import (
    MASTER_BYTES,
    STATE_BYTES,
    ZeroSettings,
    activation_share,
    arm_key,
    different_settings,
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
    pairs: float = 0.0  # a matrix of 32-bit numbers for all pairs of a micro-batch's samples, which few programs have

    @property
    def all_states(self) -> float:
        """Parameters, gradients and optimizer states, whenever they are allocated."""
        return self.initialize - self.early_buffers + self.states


@dataclass(frozen=True)
class _Case:
    """One configuration of one model, from which the sizes of all stages follow."""

    settings: ZeroSettings
    total: int  # parameters of the part of the model on one device
    trainable: int  # those of them that the optimizer changes
    shards: float  # devices that ZeRO partitions them over
    on_cpu: bool

    @classmethod
    def of(
        cls, settings: ZeroSettings, profile: ModelProfile, slots: int, profiled: Layout | None, device: str
    ) -> "_Case":
        own, shards = on_a_device(profile, slots, settings.layout, profiled)
        return cls(settings, own.num_params, own.trainable_num_params, shards, device == "cpu")

    @property
    def share(self) -> float:
        """Trainable parameters of one device if ZeRO partitions them."""
        return self.trainable / self.shards

    @property
    def size(self) -> int:
        """Bytes of a parameter in the model's precision."""
        return self.settings.precision.bytes_per_param

    @property
    def gradient_size(self) -> int:
        """Bytes of a gradient that ZeRO adds up."""
        return self.settings.precision.gradient_bytes

    @property
    def master(self) -> int:
        """Bytes of a parameter in the optimizer's copy. The update takes the gradient in that format too."""
        return self.settings.precision.master_bytes

    @property
    def states_here(self) -> bool:
        """Whether the optimizer's states are in the device's memory. On a CPU they are, offloaded or not."""
        return self.on_cpu or self.settings.offload_optimizer == "none"

    def update(self, elements: float) -> float:
        """The memory of the optimizer's update beside states and gradients, if it updates so many elements at once."""
        return self.update_on("cpu" if self.on_cpu else "cuda", elements) if self.states_here else 0.0

    def update_on(self, device: str, elements: float) -> float:
        per_element = _ADAM_UPDATE_BYTES[device] * self.master / MASTER_BYTES
        return elements * per_element if self.settings.torch_adam else 0.0

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
    case = _Case.of(settings, profile, slots, profiled.layout, device)
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
    return replace(by_stage(case), activations=activations, pairs=4.0 * micro_batch_size**2)


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


# DeepSpeed's memory on the host for a rank that offloads states from a GPU.

_OPTIMIZER, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
# Defaults of deepspeed/runtime/zero/offload_config.py.
_DEFAULTS = {
    f"{_OPTIMIZER}.pin_memory": True,
    f"{_OPTIMIZER}.buffer_count": 4,
    f"{_OPTIMIZER}.ratio": 1.0,
    f"{_PARAM}.pin_memory": True,
    f"{_PARAM}.buffer_count": 5,
    f"{_PARAM}.buffer_size": 100_000_000,
    f"{_PARAM}.max_in_cpu": 1_000_000_000,
}
HOST_KNOBS = frozenset({*_DEFAULTS, "zero_optimization.sub_group_size"})
"""The settings beside stage and offload that decide the memory on the host."""

# The mean growth of sizes that are rounded up to a power of two, if they are spread evenly in their logarithms.
_ROUNDED_UP = 1 / log(2)


@dataclass(frozen=True)
class HostBytes:
    """Bytes that one rank moves off its device."""

    held: float = 0.0  # kept in the host's memory
    optimizer_on_disk: float = 0.0  # of the optimizer, written below the `nvme_path` of `offload_optimizer`
    params_on_disk: float = 0.0  # of parameters, written below the `nvme_path` of `offload_param`

    @property
    def moved(self) -> float:
        """All together. Initialisation fills them, and every step goes through them."""
        return self.held + (self.optimizer_on_disk + self.params_on_disk)


def host_bytes(
    ds_config: Mapping[str, Any], profile: ModelProfile, slots: int, accumulates: bool, profiled: Layout | None = None
) -> HostBytes:
    """Returns the bytes that a configuration moves off a rank's device; none if it offloads nothing. Every rank may
    build the model on its host first. That is not counted, because the profile trial has shown that there is room, and
    it is freed before states are offloaded.
    """
    settings = ZeroSettings.of(ds_config, profile.bytes_per_param)
    if settings.offload_optimizer == "none" and settings.offload_param == "none":
        return HostBytes()
    case = _Case.of(settings, profile, slots, profiled, "cuda")

    def option(path: str) -> Any:
        value = get_knob(ds_config, path)
        return _DEFAULTS[path] if value in (None, "auto") else value

    if settings.stage < 3:
        return _offloaded_states(case, accumulates, option(f"{_OPTIMIZER}.pin_memory"))
    optimizer, params = _offloaded_optimizer_of_stage_3(case, option), _offloaded_params_of_stage_3(case, option)
    return HostBytes(optimizer.held + params.held, optimizer.optimizer_on_disk, params.params_on_disk)


def _offloaded_states(case: _Case, accumulates: bool, pins: bool) -> HostBytes:
    # Stages 1 and 2: master copies, gradients, the updated parameters on their way back, optimizer states.
    share = case.share
    tensors = [share * case.master, share * case.master, share * case.size]
    # A micro-batch that does not end a step leaves its gradients here, or among those of the master copy if that has
    # 16 bits (`buffer_to_accumulate_to_in_cpu`).
    tensors += [share * case.size] if accumulates and case.master == MASTER_BYTES else []
    states = share * case.settings.optimizer_bytes
    # DeepSpeed's own kernels update in place.
    update = case.update_on("cpu", share)
    return HostBytes(sum(_block(each) if pins else each for each in tensors) + states + update)


def _offloaded_optimizer_of_stage_3(case: _Case, option: Callable[[str], Any]) -> HostBytes:
    where = case.settings.offload_optimizer
    if where == "none":
        return HostBytes()
    pins = option(f"{_OPTIMIZER}.pin_memory")
    of_one = case.master + case.settings.optimizer_bytes
    gradients = case.share * case.gradient_size
    sub_group = min(case.share, case.settings.sub_group_size)  # parameters that are updated at a time
    held = (_block(gradients) if pins else gradients) + case.update_on("cpu", sub_group)
    if where == "nvme":
        buffers = (1 + option(f"{_OPTIMIZER}.buffer_count")) * sub_group * case.master
        # A gradient has a file of its own beside those of the states (`partitioned_optimizer_swapper.py`).
        return HostBytes(held + buffers, optimizer_on_disk=case.share * (of_one + case.master))
    offloaded = case.share * float(option(f"{_OPTIMIZER}.ratio"))
    groups = ceil(offloaded / sub_group) if sub_group else 0
    each = offloaded / groups * case.master if groups else 0.0
    return HostBytes(held + offloaded * of_one + groups * (_block(each) if pins else each))


def _offloaded_params_of_stage_3(case: _Case, option: Callable[[str], Any]) -> HostBytes:
    where = case.settings.offload_param
    if where == "none":
        return HostBytes()
    whole = case.total / case.shards  # frozen parameters among them
    frozen = (whole - case.share) * case.size
    if where == "nvme":
        buffers = option(f"{_PARAM}.buffer_count") * option(f"{_PARAM}.buffer_size") * case.size
        kept = min(case.share, option(f"{_PARAM}.max_in_cpu"))
        # On their way to the disk DeepSpeed 0.19.8 reserves space for whole parameters of a sub-group, not for the
        # rank's share of them (stage3.py, `_create_fp16_partitions_with_defragmentation`).
        passing = min(case.share, case.settings.sub_group_size) * case.shards if kept < case.share else 0.0
        held = buffers + _block(kept * case.size) + passing * case.size
        return HostBytes(held, params_on_disk=whole * case.size)
    flat = _block(case.share * case.size)
    if not option(f"{_PARAM}.pin_memory"):
        return HostBytes(flat + frozen)
    # Each parameter was locked alone before all came into one block, and torch does not return such a page.
    return HostBytes(flat + whole * case.size * _ROUNDED_UP)


def _block(size: float) -> float:
    # The bytes that torch locks for a tensor: a power of two (`ATen/core/CachingHostAllocator.h`).
    return float(2 ** (ceil(size) - 1).bit_length()) if size > 1 else size


# The bytes of an arm that a simulated run has found: the memory model's prior, in the place of formulas.
#
# Such a run sees what the formulas do not: the layers' own sizes, temporaries, outputs that the program keeps. It is of
# one setting of the fine knobs. The formulas give the difference to another setting.


@dataclass(frozen=True)
class SizeLine:
    """Bytes that grow with the micro-batch."""

    constant: float  # bytes of no sample
    per_sample: float = 0.0  # bytes of each sample
    per_pair: float = 0.0  # bytes of each pair of samples, whose number is the square of the samples'

    @classmethod
    def near(cls, bytes_by_size: Mapping[int, float], per_pair: float = 0.0) -> "SizeLine":
        """Returns the line with the least squared error, or a constant if more samples do not take more. The bytes of
        pairs are known.
        """
        linear = {size: its - per_pair * size**2 for size, its in bytes_by_size.items()}
        size, bytes_ = fmean(linear), fmean(linear.values())
        spread = sum((each - size) ** 2 for each in linear)
        together = sum((each - size) * (its - bytes_) for each, its in linear.items())
        if together <= 0:
            return cls(linear[max(linear)], per_pair=per_pair)
        slope = together / spread
        return cls(bytes_ - slope * size, slope, per_pair)

    def of(self, samples: int) -> float:
        """Returns the bytes of the samples alone."""
        return self.per_sample * samples + self.per_pair * samples**2

    def at(self, samples: int) -> float:
        return self.constant + self.of(samples)


@dataclass(frozen=True, kw_only=True)
class ForeseenArm:
    """The allocated bytes of one arm on one device."""

    ds_config: Mapping[str, Any]  # the complete configuration that was foreseen
    initialize: SizeLine  # bytes when `deepspeed.initialize` returns
    backward: SizeLine  # the most bytes above that in forward and backward passes
    update: SizeLine  # the most bytes above that in the optimizer's step
    host: float = 0.0  # bytes that each rank keeps in the host's memory

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseenArm":
        """Returns the arm that `to_json` wrote. A missing or unknown key is a `TypeError`."""
        lines = {name: SizeLine(**plain[name]) for name in ("initialize", "backward", "update") if name in plain}
        return cls(**{**plain, **lines})


def nearest_arm(arms: Sequence[ForeseenArm], ds_config: Mapping[str, Any]) -> ForeseenArm:
    """Returns the foreseen arm that differs least from a configuration's own. It is the same arm if that was foreseen.
    Otherwise fewer different settings are nearer, then the nearer stage.
    """
    own = switches_of(ds_config)

    def distance(arm: ForeseenArm) -> tuple[int, int]:
        different = different_settings(arm_key(arm.ds_config, ()), arm_key(ds_config, ()))
        different += sum(own.get(place) != value for place, value in switches_of(arm.ds_config).items())
        return different, abs(ZeroSettings.of(arm.ds_config).stage - ZeroSettings.of(ds_config).stage)

    return min(arms, key=distance)


def foreseen_allocations(arm: ForeseenArm, by_formula: Allocations, needed: Allocations, samples: int) -> Allocations:
    """Returns the allocations of a configuration: those of a foreseen arm, and the formulas' difference to it. A
    foreseen run counts allocated bytes. A CPU's peak counts written ones, so the arm's `limit_correction` is
    subtracted.
    """
    written = -by_formula.limit_correction
    backward = max(0.0, arm.backward.constant + written + _early(needed) - _early(by_formula))
    update = max(0.0, arm.update.constant + written + _last(needed) - _last(by_formula))
    early_states, states = min(needed.states - needed.late_states, backward), min(needed.states, update)
    early_buffers, last_buffers = backward - early_states, update - states
    # Another layout, or another number format, keeps another share of the same activations.
    share = needed.activations / by_formula.activations if by_formula.activations else 1.0
    return replace(
        needed,
        initialize=max(0.0, arm.initialize.at(samples) + needed.initialize - by_formula.initialize),
        states=states,
        late_states=states - early_states,
        # Each moment has buffers of its own.
        buffers=early_buffers + last_buffers,
        late_buffers=last_buffers,
        passing_buffers=early_buffers,
        activations=arm.backward.of(samples) * share,
        kept_activations=arm.update.of(samples) * share,
    )


def needed_above_initialize(needed: Allocations) -> float:
    """Returns the bytes at the peak of the steps above initialisation, by a configuration's allocations."""
    return max(_early(needed) + needed.activations, _last(needed) + needed.kept_activations)


def _early(needed: Allocations) -> float:
    # The bytes of no sample at the peak of the activations.
    return needed.states - needed.late_states + needed.buffers - needed.late_buffers


def _last(needed: Allocations) -> float:
    # The bytes of no sample at the optimizer's update.
    return needed.states + needed.buffers - needed.passing_buffers
