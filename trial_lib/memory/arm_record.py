"""The facts of a candidate that decide its memory, and the trials of an arm. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_lib.memory.allocations import Allocations
from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.memory.switched_activations import Keeps, Switches
from trial_lib.memory.zero_settings import ArmKey, ZeroSettings


@dataclass(frozen=True)
class Described:
    """The part of a candidate that is the same for all micro-batch sizes of some knobs.

    Attributes:
        settings: what DeepSpeed's part says.
        arm: its coarse knobs.
        switches: its coarse switches, without those that count as part of an arm.
        lineage: all of its knobs.
        foreseen: the nearest foreseen arm.
        keeps: its activations beside those as typed, or beside those of a foreseen arm.
        config: the complete configuration.
    """

    settings: ZeroSettings
    arm: ArmKey
    switches: Switches
    lineage: str
    foreseen: ForeseenArm | None
    keeps: Keeps
    config: Mapping[str, Any]


@dataclass
class ArmRecord:
    """The trials of an arm.

    Attributes:
        measured: completed trials.
        largest: the largest completed micro-batch size, by lineage.
        failed: the smallest size that ran out of memory, with its allocations, by lineage.
        bound: bytes that do not fit, including initialisation; None until they are computed again.
    """

    measured: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    failed: dict[str, tuple[int, Allocations]] = field(default_factory=dict)
    bound: float | None = None

    def decided(self, lineage: str, size: int) -> float | None:
        """Returns 1 or 0 if trials of a lineage have shown that a micro-batch size fits or does not; else None."""
        if size <= self.fits(lineage):
            return 1.0
        return 0.0 if lineage in self.failed and size >= self.failed[lineage][0] else None

    def fits(self, lineage: str) -> int:
        """Returns the largest completed micro-batch size of a lineage below its failed ones."""
        largest = self.largest.get(lineage, 0)
        return min(largest, self.failed[lineage][0] - 1) if lineage in self.failed else largest
