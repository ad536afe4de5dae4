"""The candidates that the host's memory has room for, if states are offloaded to it from GPUs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from trial_lib.command.switches import switches_of
from trial_lib.deepspeed_config.layout import Layout
from trial_lib.deepspeed_config.overrides import ACCUMULATION, overwrite_deepspeed_config
from trial_lib.memory.foreseen_bytes import nearest_arm
from trial_lib.memory.host_bytes import HOST_KNOBS, host_bytes
from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.memory.zero_settings import ArmKey, arm_key
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.units import bytes_shown
from trial_lib.space.knobs import Arm, Knob

RESERVE = 0.1
"""Share of the host's memory that stays free. If it is full, the kernel may kill a server instead of a rank."""


class HostMemory:
    """The host's memory as a budget of its own.

    A trial that ran out of it bounds its arm by the memory on the host, and says nothing about the device. A CPU's slot
    has one memory, and no such budget.

    Args:
        basis: the model, and the host's free memory in the profile trial. The bytes of a foreseen arm count, and the
            formulas give the difference to its other settings.

    Attributes:
        own: bytes that a rank keeps there with the user's configuration, which has run.
        limit: bytes that a rank may offload; None if that is not known, or if there is no such budget.
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
        self.own = self._held(base_config, accumulates) if self._on_cuda else 0.0
        # The states that the user's configuration offloads were there while the rest was free.
        self.limit = (1 - RESERVE) * profile.host_mem + self.own if self._on_cuda and profile.host_mem else None

    def needed(self, candidate: Candidate) -> float:
        """Returns the bytes that a rank of a candidate keeps in the host's memory; 0 if it offloads nothing."""
        return self._describe(candidate)[0] if self._on_cuda else 0.0

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether the host has room for a candidate, as far as is known."""
        if not self._on_cuda:
            return True
        needed, arm = self._describe(candidate)
        if needed <= self._ran.get(arm, 0.0):
            return True
        return needed < self._failed.get(arm, float("inf")) and (self.limit is None or needed <= self.limit)

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns from the end of a trial. Only a trial that offloads teaches anything."""
        if not self.needed(candidate):
            return
        needed, arm = self._describe(candidate)
        if result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            self._ran[arm] = max(needed, self._ran.get(arm, 0.0))
        elif result.outcome is Outcome.OUT_OF_HOST_MEMORY and not result.from_outside:
            self._failed[arm] = min(needed, self._failed.get(arm, needed))

    def without_room(self, arms: Iterable[Arm]) -> Iterator[str]:
        """Yields a sentence for each arm without a setting that fits."""
        for arm in arms:
            asked = [knob for knob in arm.fine if knob.path in HOST_KNOBS]
            settings = (dict(zip((knob.path for knob in asked), values, strict=True)) for values in _values(asked))
            candidates = [
                Candidate(knobs=arm.with_fine(values), micro_batch_size=1, slots=self._slots) for values in settings
            ]
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
        """Returns the bytes that a rank of a configuration keeps in the host's memory; 0 if it offloads nothing."""
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


def _values(knobs: Iterable[Knob]) -> Iterator[tuple[Any, ...]]:
    return product(*(knob.values for knob in knobs))
