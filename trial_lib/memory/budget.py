"""What a slot's memory leaves to the steps, and how much more or less than that really fits."""

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from trial_lib.memory.peak_regression import normal_below

# Prior of the slack. A CPU's budget counts what a process has asked for, a peak what it has written to: the stack of a
# thread, which comes with the first backward pass, is in the former alone (8 MiB). A CUDA allocator cannot fill every
# gap (a share of what is available).
_CPU_SLACK = (-4 * 2**20, 8 * 2**20)
_CUDA_SLACK = (-0.02, 0.03)
_GRID = np.linspace(-16, 16, 641)  # standard deviations of the prior
# From there on its tails are those of an exponential: threads that a program starts in its steps, weights that it maps
# and then writes to put one far off.
_USUAL = 2.0
# How exactly a peak is known to have been below a limit, as a share of what is available.
_EDGE = 0.02
# What analytic differences between arms may be wrong by, as a share, and at least as a share of the whole budget.
_DIFFERENCE_ERROR, _LEAST_ERROR = 0.3, 0.03


@dataclass(frozen=True)
class Uncertain:
    """A number of bytes that is known up to a standard deviation."""

    mean: float
    deviation: float


class Budget:
    """The memory of a slot, as far as trials have shown it.

    Args:
        total: bytes that the model may use on a slot by the profile; 0 where nobody knows.
        device: `cuda` or `cpu`.
    """

    def __init__(self, total: int, device: str) -> None:
        self._total = float(total)
        self._on_cpu = device == "cpu"
        far = np.abs(_GRID)
        self._log_slack = np.where(far <= _USUAL, -0.5 * far**2, -_USUAL * (far - 0.5 * _USUAL))
        # Of each arm: how many, and the mean of what was available plus what initialisation takes by its formula.
        self._seen: dict[Hashable, tuple[int, float]] = {}
        # Of each arm's trial that took most: that, and what the device could not use besides.
        self._unusable: dict[Hashable, tuple[float, float]] = {}
        self._profiled = self._total

    def left(self, arm: Hashable, initialize: float) -> Uncertain | None:
        """Returns what initialisation leaves; None where neither the profile nor a trial has shown any limit.

        Args:
            arm: the candidate's.
            initialize: bytes that its initialisation takes by the formula.
        """
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
        """Returns the largest peak above initialisation that fits.

        Where some is to stay free, what the device could not use for tensors is no part of that: pieces that the
        allocator holds, buffers that are not PyTorch's. What merely has to run is given the pieces in need.

        Args:
            arm: the candidate's.
            left: what initialisation leaves.
            headroom: share of the slot's memory that is to stay free.
        """
        weights, slack = self._weights(), self._slack(left.mean)
        mean = float(weights @ slack)
        spread = math.sqrt(float(weights @ np.square(slack - mean)))
        kept = headroom * max(self._total, left.mean) + (self._unusable_by(arm) if headroom else 0.0)
        return Uncertain(left.mean + mean - kept, math.hypot(left.deviation, spread))

    def observe_fit(self, arm: Hashable, initialize: float, available: int, above: float) -> None:
        """Takes in a trial that completed.

        Args:
            arm: its arm.
            initialize: bytes that its initialisation takes by the formula.
            available: bytes that it had left.
            above: bytes that its steps took.
        """
        count, mean = self._seen.get(arm, (0, 0.0))
        self._seen[arm] = (count + 1, mean + (available + initialize - mean) / (count + 1))
        self._learn_slack((available + self._slack(available) - above) / (_EDGE * max(available, 1)))

    def observe_unusable(self, arm: Hashable, above: float, unusable: int) -> None:
        """Takes in what the device could not use when a trial took most: what lay in pieces, what was not PyTorch's.

        Args:
            arm: its arm.
            above: bytes that its steps took.
            unusable: bytes that were neither a tensor's nor free.
        """
        if above >= self._unusable.get(arm, (0.0, 0.0))[0]:
            self._unusable[arm] = above, float(max(0, unusable))

    def _unusable_by(self, arm: Hashable) -> float:
        """Returns what is likely unusable in an arm, by itself or by the others."""
        if arm in self._unusable:
            return self._unusable[arm][1]
        return sum(bytes_ for _, bytes_ in self._unusable.values()) / max(1, len(self._unusable))

    def observe_profile(self, initialize: float, available: int) -> None:
        """Takes in the profile trial, which shows the budget better than its size does, though it starts otherwise.

        Args:
            initialize: bytes that its initialisation takes by the formula.
            available: bytes that it had left.
        """
        self._profiled = available + initialize

    def observe_failure(self, left: Uncertain, above: float, deviation: float) -> None:
        """Takes in a trial that ran out of memory.

        Args:
            left: what its initialisation left.
            above: bytes that its steps were expected to take.
            deviation: how uncertain that was.
        """
        spread = math.hypot(_EDGE * left.mean, math.hypot(deviation, left.deviation))
        self._learn_slack((above - left.mean - self._slack(left.mean)) / max(spread, 1.0))

    def _slack(self, available: float) -> np.ndarray:
        """Returns the slack, in bytes, at each point of the grid."""
        mean, deviation = _CPU_SLACK if self._on_cpu else (available * share for share in _CUDA_SLACK)
        return np.asarray(mean + deviation * _GRID)

    def _learn_slack(self, edges: np.ndarray) -> None:
        """Takes in how far, in standard deviations, each point of the grid is on the side of what was seen."""
        self._log_slack = self._log_slack + np.log([max(normal_below(edge), 1e-12) for edge in edges])

    def _weights(self) -> np.ndarray:
        weights = np.exp(self._log_slack - self._log_slack.max())
        normalised: np.ndarray = weights / weights.sum()
        return normalised
