"""Which candidates the host's memory has room for, where states are offloaded to it from GPUs."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, overwrite_deepspeed_config
from trial_lib.memory.host_bytes import HOST_KNOBS, host_bytes
from trial_lib.memory.zero_settings import ArmKey, arm_key
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.records.units import bytes_shown
from trial_lib.space.knobs import Arm, Knob

RESERVE = 0.1
"""Share of the host's memory that stays free: the kernel takes whom it likes, a shell or a server as well as a rank."""


class HostMemory:
    """The host's memory as a budget of its own.

    A trial that ran out of it bounds its arm by what it needs of the host, and says nothing of the device. A CPU's slot
    has one memory, and no such budget.

    Args:
        profile: the model, and what its trial found free on the host.
        base_config: the user's DeepSpeed configuration, with which that trial ran.
        slots: devices of a trial.
        device: `cuda` or `cpu`.

    Attributes:
        own: bytes that a rank keeps there by the user's configuration, which has run.
        limit: bytes that a rank may have offloaded; None where that is not known, or there is no such budget.
    """

    def __init__(self, profile: ModelProfile, base_config: Mapping[str, Any], slots: int, device: str) -> None:
        self._profile = profile
        self._base = base_config
        self._slots = slots
        self._on_cuda = device == "cuda"
        self._base_offloads = _names_offload(overwrite_deepspeed_config(base_config, {}))
        self._described: dict[tuple[str, bool], tuple[float, ArmKey]] = {}
        self._ran: dict[ArmKey, float] = {}
        self._failed: dict[ArmKey, float] = {}
        steps = base_config.get(ACCUMULATION)
        accumulates = isinstance(steps, int) and steps > 1
        self.own = host_bytes(base_config, profile, slots, accumulates).held if self._on_cuda else 0.0
        # What the user's configuration offloads was there while the rest was free.
        self.limit = (1 - RESERVE) * profile.host_mem + self.own if self._on_cuda and profile.host_mem else None

    def needed(self, candidate: Candidate) -> float:
        """Returns the bytes that a rank of a candidate keeps in the host's memory; 0 where it offloads nothing."""
        return self._describe(candidate)[0] if self._on_cuda else 0.0

    def fits(self, candidate: Candidate) -> bool:
        """Returns whether the host has room for a candidate, by what is known."""
        if not self._on_cuda:
            return True
        needed, arm = self._describe(candidate)
        if needed <= self._ran.get(arm, 0.0):
            return True
        return needed < self._failed.get(arm, float("inf")) and (self.limit is None or needed <= self.limit)

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Takes in how a trial ended; only what offloads teaches anything."""
        if not self.needed(candidate):
            return
        needed, arm = self._describe(candidate)
        if result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            self._ran[arm] = max(needed, self._ran.get(arm, 0.0))
        elif result.outcome is Outcome.OUT_OF_HOST_MEMORY and not result.from_outside:
            self._failed[arm] = min(needed, self._failed.get(arm, needed))

    def without_room(self, arms: Iterable[Arm]) -> Iterator[str]:
        """Yields a sentence for each arm of which no setting fits."""
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
        """Returns why a candidate is not tried, in a clause; empty where nothing is known against it."""
        needed, limit = self.needed(candidate), self.limit
        if limit is None or needed <= limit:
            return ""
        return (
            f"it would keep {bytes_shown(needed)} in the host's memory for each of its ranks, and there is room for "
            f"{bytes_shown(limit)} each, {RESERVE:.0%} of it kept free."
        )

    def _describe(self, candidate: Candidate) -> tuple[float, ArmKey]:
        # Asked for each size of each candidate, most of which offload nothing.
        if not self._base_offloads and not _names_offload(candidate.knobs):
            return 0.0, ()
        accumulates = candidate.gradient_accumulation_steps > 1
        key = json.dumps(candidate.knobs, sort_keys=True), accumulates
        if key not in self._described:
            config = overwrite_deepspeed_config(self._base, candidate.knobs)
            held = host_bytes(config, self._profile, self._slots, accumulates).held
            self._described[key] = held, arm_key(config)
        return self._described[key]


def _names_offload(config: Mapping[str, Any]) -> bool:
    zero = config.get("zero_optimization")
    return isinstance(zero, Mapping) and any("offload" in key for key in zero)


def _values(knobs: Iterable[Knob]) -> Iterator[tuple[Any, ...]]:
    return product(*(knob.values for knob in knobs))
