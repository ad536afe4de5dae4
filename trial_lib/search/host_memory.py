"""The candidates that the host's memory has room for, if states are offloaded to it from GPUs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil, log
from typing import Any

from trial_lib.deepspeed_config.layout import Layout
from trial_lib.deepspeed_config.overrides import ACCUMULATION, overwrite_deepspeed_config
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.records.switches import switches_of
from trial_lib.records.units import bytes_shown
from trial_lib.search.budget import MemoryBasis
from trial_lib.search.foreseen_bytes import nearest_arm
from trial_lib.search.knobs import Arm, get_knob
from trial_lib.search.zero_settings import MASTER_BYTES, ArmKey, ZeroSettings, arm_key, on_a_device

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
# Bytes of PyTorch's own Adam for each parameter that it updates, if its master copy has 32 bits (torch/optim/adam.py).
_TORCH_ADAM_BYTES = 8


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
    own, shards = on_a_device(profile, slots, settings.layout, profiled)
    case = _Case(ds_config, settings, shards, own.num_params / shards, own.trainable_num_params / shards)
    if settings.stage < 3:
        return _partitioned_states(case, accumulates)
    optimizer, params = _optimizer_of_stage_3(case), _params_of_stage_3(case)
    return HostBytes(optimizer.held + params.held, optimizer.optimizer_on_disk, params.params_on_disk)


@dataclass(frozen=True)
class _Case:
    """A configuration, with the devices that share a model, and a rank's share of all and of trainable parameters."""

    config: Mapping[str, Any]
    settings: ZeroSettings
    shards: float
    all_share: float
    share: float

    def option(self, path: str) -> Any:
        value = get_knob(self.config, path)
        return _DEFAULTS[path] if value in (None, "auto") else value

    @property
    def size(self) -> int:
        return self.settings.precision.bytes_per_param

    @property
    def master(self) -> int:
        """Bytes of a parameter of the master copy, and of its gradient for the update."""
        return self.settings.precision.master_bytes

    @property
    def sub_group(self) -> float:
        """Elements that stage 3 updates at a time."""
        return min(self.share, self.settings.sub_group_size)

    @property
    def torch_adam_bytes(self) -> float:
        """Bytes that PyTorch's own Adam needs for each parameter of a tensor that it updates."""
        return _TORCH_ADAM_BYTES * self.master / MASTER_BYTES

    @property
    def update(self) -> float:
        """The memory of the update beside states and gradients. DeepSpeed's own kernels update in place."""
        return self.sub_group * self.torch_adam_bytes if self.settings.torch_adam else 0.0


def _partitioned_states(case: _Case, accumulates: bool) -> HostBytes:
    # Stages 1 and 2: master copies, gradients, the updated parameters on their way back, optimizer states.
    share, pins = case.share, case.option(f"{_OPTIMIZER}.pin_memory")
    tensors = [share * case.master, share * case.master, share * case.size]
    # A micro-batch that does not end a step leaves its gradients here, or among those of the master copy if that has
    # 16 bits (`buffer_to_accumulate_to_in_cpu`).
    tensors += [share * case.size] if accumulates and case.master == MASTER_BYTES else []
    states = share * case.settings.optimizer_bytes
    update = share * case.torch_adam_bytes if case.settings.torch_adam else 0.0
    return HostBytes(sum(_block(each) if pins else each for each in tensors) + states + update)


def _optimizer_of_stage_3(case: _Case) -> HostBytes:
    where = case.settings.offload_optimizer
    if where == "none":
        return HostBytes()
    pins = case.option(f"{_OPTIMIZER}.pin_memory")
    of_one = case.master + case.settings.optimizer_bytes
    gradients = case.share * case.settings.precision.gradient_bytes
    held = (_block(gradients) if pins else gradients) + case.update
    if where == "nvme":
        buffers = (1 + case.option(f"{_OPTIMIZER}.buffer_count")) * case.sub_group * case.master
        # A gradient has a file of its own beside those of the states (`partitioned_optimizer_swapper.py`).
        return HostBytes(held + buffers, optimizer_on_disk=case.share * (of_one + case.master))
    offloaded = case.share * float(case.option(f"{_OPTIMIZER}.ratio"))
    groups = ceil(offloaded / case.sub_group) if case.sub_group else 0
    each = offloaded / groups * case.master if groups else 0.0
    return HostBytes(held + offloaded * of_one + groups * (_block(each) if pins else each))


def _params_of_stage_3(case: _Case) -> HostBytes:
    where = case.settings.offload_param
    if where == "none":
        return HostBytes()
    frozen = (case.all_share - case.share) * case.size
    if where == "nvme":
        buffers = case.option(f"{_PARAM}.buffer_count") * case.option(f"{_PARAM}.buffer_size") * case.size
        kept = min(case.share, case.option(f"{_PARAM}.max_in_cpu"))
        # On their way to the disk DeepSpeed 0.19.8 reserves space for whole parameters of a sub-group, not for the
        # rank's share of them (stage3.py, `_create_fp16_partitions_with_defragmentation`).
        passing = case.sub_group * case.shards if kept < case.share else 0.0
        held = buffers + _block(kept * case.size) + passing * case.size
        return HostBytes(held, params_on_disk=case.all_share * case.size)
    flat = _block(case.share * case.size)
    if not case.option(f"{_PARAM}.pin_memory"):
        return HostBytes(flat + frozen)
    # Each parameter was locked alone before all came into one block, and torch does not return such a page.
    return HostBytes(flat + case.all_share * case.size * _ROUNDED_UP)


def _block(size: float) -> float:
    # The bytes that torch locks for a tensor: a power of two (`ATen/core/CachingHostAllocator.h`).
    return float(2 ** (ceil(size) - 1).bit_length()) if size > 1 else size


RESERVE = 0.1
"""Share of the host's memory that stays free. If it is full, the kernel may kill a server instead of a rank."""


class HostMemory:
    """The host's memory as a budget of its own. A trial that ran out of it bounds its arm by the memory on the host,
    and says nothing about the device. A CPU's slot has one memory, and no such budget. The bytes of a foreseen arm
    count, and the formulas give the difference to its other settings.
    """

    def __init__(self, basis: MemoryBasis) -> None:
        profile, base_config = basis.profile, basis.base_config
        self._profile = profile
        self._base = base_config
        self._slots = basis.slots
        self._foreseen = tuple(basis.arms)
        self._on_cuda = basis.device == "cuda"
        self._base_offloads = _names_offload(overwrite_deepspeed_config(base_config, {}))
        self._described: dict[tuple[str, bool], tuple[float, ArmKey]] = {}
        self._ran: dict[ArmKey, float] = {}
        self._failed: dict[ArmKey, float] = {}
        steps = base_config.get(ACCUMULATION)
        accumulates = isinstance(steps, int) and steps > 1
        # The bytes that a rank keeps there with the user's configuration, which has run
        self.own = self._held(base_config, accumulates) if self._on_cuda else 0.0
        # The bytes that a rank may offload; None if that is not known, or if there is no such budget. The states that
        # the user's configuration offloads were there while the rest was free.
        self.limit = (1 - RESERVE) * profile.host_mem + self.own if self._on_cuda and profile.host_mem else None

    def needed(self, candidate: Candidate) -> float:
        """Returns the bytes that a rank of a candidate keeps in the host's memory; 0 if it offloads nothing."""
        return self._describe(candidate)[0] if self._on_cuda else 0.0

    def fits(self, candidate: Candidate) -> bool:
        if not self._on_cuda:
            return True
        needed, arm = self._describe(candidate)
        if needed <= self._ran.get(arm, 0.0):
            return True
        return needed < self._failed.get(arm, float("inf")) and (self.limit is None or needed <= self.limit)

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Only a trial that offloads teaches anything."""
        if not self.needed(candidate):
            return
        needed, arm = self._describe(candidate)
        if result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            self._ran[arm] = max(needed, self._ran.get(arm, 0.0))
        elif result.outcome is Outcome.OUT_OF_HOST_MEMORY and not result.from_outside:
            self._failed[arm] = min(needed, self._failed.get(arm, needed))

    def without_room(self, arms: Iterable[Arm]) -> Iterator[str]:
        for arm in arms:
            asked = [knob for knob in arm.fine if knob.path in HOST_KNOBS]
            settings = [
                arm.with_fine(dict(zip((knob.path for knob in asked), values, strict=True)))
                for values in product(*(knob.values for knob in asked))
            ]
            candidates = (Candidate(knobs=knobs, micro_batch_size=1, slots=self._slots) for knobs in settings)
            least = min(candidates, key=self.needed)
            if self.lack(least):
                yield f"{arm.label} is not tried: {self.lack(least)}"

    def lack(self, candidate: Candidate) -> str:
        """Returns why the host has no room for a candidate, as a clause; empty if it may have."""
        needed, limit = self.needed(candidate), self.limit
        if limit is None or needed <= limit:
            return ""
        return (
            f"it would keep {bytes_shown(needed)} in the host's memory for each of its ranks, and there is room for "
            f"{bytes_shown(limit)} each, {RESERVE:.0%} of it kept free."
        )

    def _describe(self, candidate: Candidate) -> tuple[float, ArmKey]:
        # This runs for each size of each candidate, and most offload nothing.
        if not self._base_offloads and not _names_offload(candidate.knobs):
            return 0.0, ()
        accumulates = candidate.gradient_accumulation_steps > 1
        key = json.dumps(candidate.knobs, sort_keys=True), accumulates
        if key not in self._described:
            config = overwrite_deepspeed_config(self._base, candidate.knobs)
            self._described[key] = self._held(config, accumulates), arm_key(config)
        return self._described[key]

    def _held(self, config: Mapping[str, Any], accumulates: bool) -> float:
        # The bytes that a rank of a configuration keeps in the host's memory; 0 if it offloads nothing.
        by_formula = host_bytes(config, self._profile, self._slots, accumulates, Layout.of(self._base)).held
        if by_formula <= 0 or not self._foreseen:
            return by_formula
        arm = nearest_arm(self._foreseen, config)
        if arm.host <= 0 or arm_key(arm.ds_config) != arm_key(config, switches_of(arm.ds_config)):
            return by_formula
        steps = arm.ds_config.get(ACCUMULATION)
        accumulated = isinstance(steps, int) and steps > 1
        then = host_bytes(arm.ds_config, self._profile, self._slots, accumulated, Layout.of(self._base)).held
        return max(0.0, arm.host + by_formula - then)


def _names_offload(config: Mapping[str, Any]) -> bool:
    zero = config.get("zero_optimization")
    return isinstance(zero, Mapping) and any("offload" in key for key in zero)
