"""The bytes of an arm that a foreseen run has found: the memory model's prior, in the place of formulas. Pure.

A foreseen run sees what the formulas do not: the layers' own sizes, temporaries, outputs that the program keeps. It is
of one setting of the fine knobs. The formulas give the difference to another setting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from trial_lib.command.switches import switches_of
from trial_lib.memory.allocations import Allocations
from trial_lib.memory.zero_settings import ZeroSettings, arm_key, different_settings


@dataclass(frozen=True)
class SizeLine:
    """Bytes that grow with the micro-batch.

    Attributes:
        constant: bytes of no sample.
        per_sample: bytes of each sample.
    """

    constant: float
    per_sample: float = 0.0

    @classmethod
    def near(cls, bytes_by_size: Mapping[int, float]) -> "SizeLine":
        """Returns the line with the least squared error, or a constant if more samples do not take more.

        Args:
            bytes_by_size: bytes by samples, of two sizes at least. Two sizes give the line through both.
        """
        size, bytes_ = fmean(bytes_by_size), fmean(bytes_by_size.values())
        spread = sum((each - size) ** 2 for each in bytes_by_size)
        together = sum((each - size) * (its - bytes_) for each, its in bytes_by_size.items())
        if together <= 0:
            return cls(bytes_by_size[max(bytes_by_size)])
        slope = together / spread
        return cls(bytes_ - slope * size, slope)

    def at(self, samples: int) -> float:
        """Returns the bytes of a micro-batch size (samples)."""
        return self.constant + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class ForeseenArm:
    """The allocated bytes of one arm on one device.

    Attributes:
        ds_config: the complete configuration that was foreseen.
        initialize: bytes when `deepspeed.initialize` returns.
        backward: the most bytes above that in forward and backward passes.
        update: the most bytes above that in the optimizer's step.
        host: bytes that each rank keeps in the host's memory.
    """

    ds_config: Mapping[str, Any]
    initialize: SizeLine
    backward: SizeLine
    update: SizeLine
    host: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseenArm":
        """Returns the arm that `to_json` wrote.

        Raises:
            TypeError: a key is missing or unknown.
        """
        lines = {name: SizeLine(**plain[name]) for name in ("initialize", "backward", "update") if name in plain}
        return cls(**{**plain, **lines})


def nearest_arm(arms: Sequence[ForeseenArm], ds_config: Mapping[str, Any]) -> ForeseenArm:
    """Returns the foreseen arm that differs least from a configuration's own.

    It is the same arm if that was foreseen. Otherwise fewer different settings are nearer, then the nearer stage.

    Args:
        arms: at least one.
        ds_config: a complete configuration.
    """
    own = switches_of(ds_config)

    def distance(arm: ForeseenArm) -> tuple[int, int]:
        different = different_settings(arm_key(arm.ds_config, ()), arm_key(ds_config, ()))
        different += sum(own.get(place) != value for place, value in switches_of(arm.ds_config).items())
        return different, abs(ZeroSettings.of(arm.ds_config).stage - ZeroSettings.of(ds_config).stage)

    return min(arms, key=distance)


def foreseen_allocations(arm: ForeseenArm, by_formula: Allocations, needed: Allocations, samples: int) -> Allocations:
    """Returns the allocations of a configuration: those of a foreseen arm, and the formulas' difference to it.

    A foreseen run counts allocated bytes. A CPU's peak counts written ones, so the arm's `limit_correction` is
    subtracted.

    Args:
        arm: foreseen.
        by_formula: of the foreseen configuration.
        needed: of the configuration itself, by the formulas.
        samples: of the micro-batch.
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
        activations=arm.backward.per_sample * samples * share,
        kept_activations=arm.update.per_sample * samples * share,
    )


def needed_above_initialize(needed: Allocations) -> float:
    """Returns the bytes at the peak of the steps above initialisation, by a configuration's allocations."""
    return max(_early(needed) + needed.activations, _last(needed) + needed.kept_activations)


def _early(needed: Allocations) -> float:
    """Returns the bytes of no sample at the peak of the activations."""
    return needed.states - needed.late_states + needed.buffers - needed.late_buffers


def _last(needed: Allocations) -> float:
    """Returns the bytes of no sample at the optimizer's update."""
    return needed.states + needed.buffers - needed.passing_buffers
