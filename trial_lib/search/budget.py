"""The memory of a slot that is left to the steps, and the slack: how much more or less than that really fits."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM
from trial_lib.messages.turned import COMPILE_PLACES
from trial_lib.records.result import ModelProfile
from trial_lib.records.switches import switches_of
from trial_lib.search.foreseen_bytes import ForeseenArm
from trial_lib.search.peak_regression import normal_below, normalised

# Prior of the slack. A CPU's budget counts the memory that a process has asked for, and a peak the memory that it has
# written. Only the former contains the stack of a thread (8 MiB), which starts with the first backward pass. A CUDA
# allocator cannot fill every gap (a share of the available memory).
_CPU_SLACK = (-4 * 2**20, 8 * 2**20)
_CUDA_SLACK = (-0.02, 0.03)
_GRID = np.linspace(-16, 16, 641)  # standard deviations of the prior
# From there on its tails are exponential. A program may start threads in its steps, or map weights and then write to
# them. Either puts it far off.
_USUAL = 2.0
# The precision of the knowledge that a peak was below a limit, as a share of the available memory.
_EDGE = 0.02
# The error of analytic differences between arms, as a share, and at least as a share of the whole budget.
_DIFFERENCE_ERROR, _LEAST_ERROR = 0.3, 0.03


@dataclass(frozen=True)
class Uncertain:
    """A number of bytes with its standard deviation."""

    mean: float
    deviation: float


class Budget:
    """The memory of a slot in bytes (0 if the profile does not know it), as far as trials have shown it."""

    def __init__(self, total: int, device: str) -> None:
        self._total = float(total)
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
        return Uncertain(mean - initialize, math.hypot(_DIFFERENCE_ERROR * initialize, _LEAST_ERROR * mean))

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
        mean, deviation = _CPU_SLACK if self._on_cpu else (available * share for share in _CUDA_SLACK)
        return np.asarray(mean + deviation * _GRID)

    def _learn_slack(self, edges: np.ndarray) -> None:
        # Learns from the distance of each grid point to the observed side, in standard deviations.
        self._log_slack = self._log_slack + np.log([max(normal_below(edge), 1e-12) for edge in edges])
        self._weights = np.array(normalised(self._log_slack))


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
