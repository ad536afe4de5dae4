"""The bytes of an arm that a foreseen run has found: the memory model's prior, in the place of formulas. Pure.

A foreseen run sees what the formulas do not: the layers' own sizes, temporaries, outputs that the program keeps. It is
of one setting of the fine knobs. The formulas give the difference to another setting.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from statistics import fmean
from typing import Any, TypeAlias

from trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE_PLACES
from trial_lib.records.switches import switches_of
from trial_lib.search.allocations import Allocations
from trial_lib.search.peak_regression import Prior
from trial_lib.search.zero_settings import ZeroSettings, arm_key, different_settings


@dataclass(frozen=True)
class SizeLine:
    """Bytes that grow with the micro-batch."""

    constant: float  # bytes of no sample
    per_sample: float = 0.0  # bytes of each sample

    @classmethod
    def near(cls, bytes_by_size: Mapping[int, float]) -> "SizeLine":
        """Returns the line with the least squared error, or a constant if more samples do not take more."""
        size, bytes_ = fmean(bytes_by_size), fmean(bytes_by_size.values())
        spread = sum((each - size) ** 2 for each in bytes_by_size)
        together = sum((each - size) * (its - bytes_) for each, its in bytes_by_size.items())
        if together <= 0:
            return cls(bytes_by_size[max(bytes_by_size)])
        slope = together / spread
        return cls(bytes_ - slope * size, slope)

    def at(self, samples: int) -> float:
        return self.constant + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class ForeseenArm:
    """The allocated bytes of one arm on one device."""

    ds_config: Mapping[str, Any]  # the complete configuration that was foreseen
    initialize: SizeLine  # bytes when `deepspeed.initialize` returns
    backward: SizeLine  # the most bytes above that in forward and backward passes
    update: SizeLine  # the most bytes above that in the optimizer's step
    host: float = 0.0  # bytes that each rank keeps in the host's memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

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
        activations=arm.backward.per_sample * samples * share,
        kept_activations=arm.update.per_sample * samples * share,
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


# How switches of the program change the activations that it keeps.

Switches: TypeAlias = tuple[tuple[str, str], ...]
"""Place and value (its `repr`) of each switch that decides memory."""

# Each value is expected to keep no more than the one before it. A Hugging Face Trainer's own options are the same
# switches.
_ATTENTION = [repr(value) for value in ("eager", "sdpa", "flash_attention_2")]
_FROM_MOST = {
    CHECKPOINTING: [repr(value) for value in ("none", "every_second", "full")],
    "--gradient_checkpointing": [repr(value) for value in (False, True)],
    ATTENTION: _ATTENTION,
    "--attn_implementation": _ATTENTION,
}
# If no fused kernel takes a program's attention, PyTorch's `sdpa` computes it by matrix products and keeps more than
# attention as written. On two samples of four heads and 256 tokens, on a CPU, autograd saved 3.5 MiB for 3.0 in bf16.
# `tests/unit/search/test_attention_as_kept.py` shows it again.
_UNSURE = frozenset(repr(value) for value in ("eager", "sdpa"))
# With every second of its blocks recomputed, a program keeps the others as without recomputation: half of it.
_HALF_OF = {(CHECKPOINTING, repr("every_second")): repr("none")}
# Such a switch changes no more than another arm does. On a CPU the compiler stays in the resident memory of a rank.
_LIKE_AN_ARM = {"cuda": frozenset(COMPILE_PLACES), "cpu": frozenset[str]()}


class Keeps(Enum):
    """The activations that a program with some switches keeps, beside those with others."""

    LESS, AS_MUCH, MORE, UNKNOWN = range(4)


def keeps(switches: Switches, other: Switches, surely: bool = False) -> Keeps:
    """Returns whether some switches are expected to keep more activations than others; `surely`, of every program."""
    own, others = dict(switches), dict(other)
    differing = [place for place in {**own, **others} if own.get(place) != others.get(place)]
    if not differing:
        return Keeps.AS_MUCH
    if surely and any({own.get(place), others.get(place)} == _UNSURE for place in differing):
        return Keeps.UNKNOWN
    found = {_keeps_less(place, own.get(place), others.get(place)) for place in differing}
    if len(found) > 1 or None in found:
        return Keeps.UNKNOWN
    return Keeps.LESS if True in found else Keeps.MORE


@dataclass(frozen=True)
class Beside:
    """What a program keeps beside tried switches."""

    keeps: Keeps  # less or more than with them
    surely: bool  # whether that holds for every program
    values: Mapping[str, Any]  # the tried values of the switches that decide memory, by their places
    part: int = 1  # it keeps more than with them at the micro-batch size divided by this


class TriedSwitches:
    """The switches of the trials that have ended."""

    def __init__(self) -> None:
        self._values: dict[Switches, dict[str, Any]] = {}
        self._completed: set[Switches] = set()
        self._around: dict[Switches, list[Beside]] = {}

    def note(self, switches: Switches, program: Mapping[str, Any], completed: bool) -> None:
        """Notes the values of a trial's switches, by place. One that has not completed ran out of memory."""
        self._values.setdefault(switches, {place: program[place] for place, _ in switches})
        if completed:
            self._completed.add(switches)
        self._around.clear()

    def has_run(self, switches: Switches) -> bool:
        return switches in self._completed

    def around(self, switches: Switches) -> list[Beside]:
        """The tried switches that bound what a program with others keeps, surely or as expected."""
        if switches not in self._around:
            self._around[switches] = [
                each for tried, values in self._values.items() for each in _bounds(switches, tried, values)
            ]
        return self._around[switches]


def _bounds(switches: Switches, tried: Switches, values: Mapping[str, Any]) -> Iterator[Beside]:
    beside = keeps(switches, tried)
    if beside in (Keeps.LESS, Keeps.MORE):
        yield Beside(beside, keeps(switches, tried, surely=True) is beside, values)
    whole = tuple((place, _HALF_OF.get((place, value), value)) for place, value in switches)
    if whole != switches and keeps(whole, tried) in (Keeps.AS_MUCH, Keeps.MORE):
        yield Beside(Keeps.MORE, False, values, part=2)


def without_arm_like(switches: Switches, device: str) -> Switches:
    """Returns switches without those that change memory no more than another arm does."""
    return tuple(each for each in switches if each[0] not in _LIKE_AN_ARM[device])


def other_priors(usual: Sequence[Prior], beside: Keeps) -> tuple[Prior, ...]:
    """Returns the priors of memory with other switches than typed, by the activations that they keep beside those."""
    if beside is Keeps.AS_MUCH:
        return tuple(usual)
    # Recomputation leaves an eighth to a third (2205.05198).
    less = _with_activations(usual[0], 0.5, 0.3, 0.2)
    # So a program without it keeps three to eight times as much, and by the equations alone 17 times. With the scores
    # it keeps 1.6 to 6 times as much, for 512 to 4,096 tokens.
    more = _with_activations(usual[0], 0.3, 5.0, 2.5), _with_activations(usual[0], 0.3, 12.0, 5.0)
    if beside is Keeps.LESS:
        return (*usual, less)
    if beside is Keeps.MORE:
        return (*(replace(prior, weight=prior.weight / 4) for prior in usual), *more)
    return (*usual, less, more[0])


def _with_activations(prior: Prior, weight: float, mean: float, deviation: float) -> Prior:
    means, deviations = list(prior.means), list(prior.deviations)
    means[1], deviations[1] = mean, deviation
    return Prior(weight, tuple(means), tuple(deviations))


def _keeps_less(place: str, value: str | None, other: str | None) -> bool | None:
    known = _FROM_MOST.get(place, [])
    return known.index(value) > known.index(other) if value in known and other in known else None
