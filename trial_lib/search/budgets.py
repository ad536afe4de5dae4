"""The memory that candidates may use: of a slot, and of its host if states are offloaded to that from GPUs."""

import json
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM, Layout
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, overwrite_deepspeed_config
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.messages.turned import COMPILE_PLACES
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.switches import switches_of
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.search.allocations import HOST_KNOBS, ForeseenArm, host_bytes, nearest_arm
from zerotune.trial_lib.search.knobs import Arm
from zerotune.trial_lib.search.peak_regression import normal_below, normalised
from zerotune.trial_lib.search.zero_settings import ArmKey, arm_key


@dataclass(frozen=True)
class MemoryBasis:
    """A model on some devices, which have a memory of their own and their host's."""

    profile: ModelProfile  # the model, the device and the host, as the profile trial found them
    base_config: Mapping[str, Any]  # the user's DeepSpeed configuration, with which that trial ran
    slots: int  # devices of a trial
    device: str  # `cuda` or `cpu`
    foreseen: Sequence[ForeseenArm] = ()  # arms that foreseen runs have found. Without any, formulas give all bytes.

    @property
    def arms(self) -> tuple[ForeseenArm, ...]:
        """The foreseen arms, each in the layout of the command as typed, which no foreseen run changes. On a CPU the
        compiler stays in the resident memory of a rank. No foreseen run has it, so the arms do not say there whether
        they are compiled.
        """
        layouts = self.base_config.get(LAYOUTS) or {}
        typed = {place: switches_of(self.base_config).get(place) for place in layouts}
        hidden = frozenset(COMPILE_PLACES if self.device == "cpu" else ())

        def shown(arm: ForeseenArm) -> ForeseenArm:
            switches = switches_of(arm.ds_config)
            if not layouts and not hidden & switches.keys():
                return arm
            seen = {place: value for place, value in switches.items() if place not in hidden}
            groups = {LAYOUTS: layouts} if layouts else {}
            return replace(arm, ds_config={**arm.ds_config, PROGRAM: {**typed, **seen}, **groups})

        return tuple(map(shown, self.foreseen))


# The memory of a slot that is left to the steps, and the slack: how much more or less than that really fits.

# Prior of the slack: its mode, and how far it lies below and above. A CPU's budget counts the memory that a process has
# asked for, and a peak the memory that it has written, so a peak hardly ever takes more than was left. Only the former
# contains the stack of a thread (8 MiB), which starts with the first backward pass, and holes of the heap that nothing
# was written to. A CUDA allocator cannot fill every gap (a share of the available memory).
_CPU_SLACK = (-4 * 2**20, 12 * 2**20, 4 * 2**20)
_CUDA_SLACK = (-0.02, 0.03, 0.03)
_GRID = np.linspace(-16, 16, 641)  # standard deviations of the prior
# From there on its tails are exponential. A program may start threads in its steps, or map weights and then write to
# them. Either puts it far off.
_USUAL = 2.0
# The precision of the knowledge that a peak was below a limit, as a share of the available memory.
_EDGE = 0.02
# The error of differences between arms, as a share: of analytic ones, and of foreseen ones on a GPU, which are off as
# other foreseen peaks are (trial_lib/plan/fits.py says by what). At least it is a share of the whole budget.
_DIFFERENCE_ERROR, FORESEEN_ERROR, _LEAST_ERROR = 0.3, 0.096, 0.03


@dataclass(frozen=True)
class Uncertain:
    """A number of bytes with its standard deviation."""

    mean: float
    deviation: float


class Budget:
    """The memory of a slot in bytes (0 if the profile does not know it), as far as trials have shown it."""

    def __init__(self, total: int, device: str, is_foreseen: bool = False) -> None:
        self._total = float(total)
        self._difference_error = FORESEEN_ERROR if is_foreseen and device == "cuda" else _DIFFERENCE_ERROR
        self._on_cpu = device == "cpu"
        far = np.abs(_GRID)
        self._log_slack = np.where(far <= _USUAL, -0.5 * far**2, -_USUAL * (far - 0.5 * _USUAL))
        self._weights = np.array(normalised(self._log_slack))
        # For each arm: the number of trials, and their mean of the available memory plus the formula's
        # initialisation.
        self._seen: dict[Hashable, tuple[int, float]] = {}
        # For the trial of each arm that took most: its memory, and the unusable memory besides.
        self._unusable: dict[Hashable, tuple[float, float]] = {}
        self._profiled = self._total

    def left(self, arm: Hashable, initialize: float) -> Uncertain | None:
        """Returns the memory that initialisation leaves; None if neither the profile nor a trial has shown a limit."""
        seen = self._seen.get(arm)
        if seen is not None:
            return Uncertain(seen[1] - initialize, 0.01 * seen[1])
        if self._seen:
            mean = sum(total for _, total in self._seen.values()) / len(self._seen)
        elif self._profiled > 0:
            mean = self._profiled
        else:
            return None
        return Uncertain(mean - initialize, math.hypot(self._difference_error * initialize, _LEAST_ERROR * mean))

    def limit(self, arm: Hashable, left: Uncertain, headroom: float) -> Uncertain:
        """Returns the largest peak above initialisation that fits. Some memory is unusable for tensors: pieces that the
        allocator holds, and buffers that are not PyTorch's. It does not count as headroom. Without a headroom the
        allocator may use its pieces.
        """
        weights, slack = self._weights, self._slack(left.mean)
        mean = float(weights @ slack)
        spread = math.sqrt(float(weights @ np.square(slack - mean)))
        kept = headroom * max(self._total, left.mean) + (self._unusable_by(arm) if headroom else 0.0)
        return Uncertain(left.mean + mean - kept, math.hypot(left.deviation, spread))

    def observe_fit(self, arm: Hashable, initialize: float, available: int, above: float) -> None:
        """Learns from a completed trial: the bytes that initialisation left, and those that its steps took above it."""
        count, mean = self._seen.get(arm, (0, 0.0))
        self._seen[arm] = (count + 1, mean + (available + initialize - mean) / (count + 1))
        self._learn_slack((available + self._slack(available) - above) / (_EDGE * max(available, 1)))

    def observe_unusable(self, arm: Hashable, above: float, unusable: int) -> None:
        """Learns the unusable memory at a trial's peak: pieces of the allocator, and what is not PyTorch's."""
        if above >= self._unusable.get(arm, (0.0, 0.0))[0]:
            self._unusable[arm] = above, float(max(0, unusable))

    def _unusable_by(self, arm: Hashable) -> float:
        if arm in self._unusable:
            return self._unusable[arm][1]
        return sum(bytes_ for _, bytes_ in self._unusable.values()) / max(1, len(self._unusable))

    def observe_profile(self, initialize: float, available: int) -> None:
        """Learns from the profile trial. It shows the budget better than the size does, although its start differs."""
        self._profiled = available + initialize

    def observe_failure(self, left: Uncertain, above: float, deviation: float) -> None:
        """Learns from a trial that ran out of memory, beside the bytes that its steps were expected to take."""
        spread = math.hypot(_EDGE * left.mean, math.hypot(deviation, left.deviation))
        self._learn_slack((above - left.mean - self._slack(left.mean)) / max(spread, 1.0))

    def _slack(self, available: float) -> np.ndarray:
        # The slack, in bytes, at each point of the grid.
        mode, below, above = _CPU_SLACK if self._on_cpu else (available * share for share in _CUDA_SLACK)
        return np.asarray(mode + np.where(_GRID < 0, below, above) * _GRID)

    def _learn_slack(self, edges: np.ndarray) -> None:
        # Learns from the distance of each grid point to the observed side, in standard deviations.
        self._log_slack = self._log_slack + np.log([max(normal_below(edge), 1e-12) for edge in edges])
        self._weights = np.array(normalised(self._log_slack))


# The host's memory.

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
