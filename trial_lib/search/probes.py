"""Which settings of an arm's fine knobs are worth a trial, and what they may bring that nobody expects.

Most values of most knobs bring little, and a few bring much: a normal distribution has no room for both. So the cost
model, which is normal, describes the little, and this file the much. A value that its arm has not had yet may be a
surprise. How often that is so, and how large such gains are, is learned from the values that the study has tried.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from zerotune.trial_lib.search.catalogue import INTERACTING
from zerotune.trial_lib.search.cost_model import Array, Point
from zerotune.trial_lib.search.knobs import Arm

FineSetting = tuple[str, str]
"""A fine knob by path, and one of its values as text. Arms may have other values of a knob."""

# A gain from here on is a surprise (logarithm of the cost). Of 72 values on the recorded tables (benchmarks/replay) 6
# gain that much over the best guess of their arm, by 0.15 in the mean. They count as so many values that were tried.
_SURPRISE = 0.05
_TRIED, _SURPRISED, _GAIN = 12.0, 1.0, 0.15
# Assumptions: how much a knob changes the cost, either way, to matter; what is hoped of two knobs together beside one
# alone; what is left of a hope that an arm with the same DeepSpeed settings has disappointed.
_MATTERS, _TOGETHER, _SAME_SETTINGS = 0.025, 0.1, 0.15
# A family that costs this much more than the best guess may hide that one of several values gains.
_HIDES = 0.1
# A family is surely lost if fewer surprises than this share would make it the best.
_LOST = 0.1
# Families of an arm that are drawn near the leader, half of the knobs at any value.
_DRAWN = 6


def departures(arm: Arm, index: int) -> Iterator[int]:
    """Yields the families that differ from one in a single knob."""
    weight = 1
    for knob, position in arm.positions(index):
        yield from (index + weight * (other - position) for other in range(len(knob.values)) if other != position)
        weight *= len(knob.values)


def settings_of(arm: Arm, index: int) -> frozenset[FineSetting]:
    """Returns the knobs of a family that are not at their best guess."""
    return frozenset((knob.path, repr(knob.values[position])) for knob, position in arm.positions(index) if position)


def index_of(arm: Arm, settings: Iterable[FineSetting]) -> int:
    """Returns the family of an arm with some settings, and the other knobs at their best guess."""
    index, weight, values = 0, 1, dict(settings)
    for knob in arm.fine:
        if knob.path in values:
            index += weight * [repr(value) for value in knob.values].index(values[knob.path])
        weight *= len(knob.values)
    return index


@dataclass(frozen=True)
class ArmProbes:
    """The settings that one arm has had, and what each is expected to cost beside the best guess of its knob."""

    arm: Arm
    same: int  # one number for all arms that differ in switches of the program alone
    cost: float  # of the leader
    leader: int  # the measured family that is expected to cost least
    families: Collection[int]  # that have a cost, or are in flight
    effects: Mapping[FineSetting, float]  # logarithms; of every value but the best guesses
    tried: frozenset[FineSetting]  # those that would have shown a gain

    @classmethod
    def of(
        cls,
        arm: Arm,
        number: int,
        same: int,
        measured: Sequence[tuple[float, Point]],
        in_flight: Iterable[Point],
        expected: Callable[[Sequence[Point]], Array],
    ) -> "ArmProbes":
        """Returns what the measured points of an arm, with their expected costs, say by a cost model. Values that are
        in flight count as tried.
        """
        cost, leader = min(measured, key=lambda each: each[0])
        pending = [point.index for point in in_flight if point.arm == number]
        families = list(dict.fromkeys([*(point.index for _, point in measured), *pending]))
        settings = [(knob.path, repr(value)) for knob in arm.fine for value in knob.values[1:]]
        points = [Point(number, index_of(arm, [setting]), leader.size) for setting in settings]
        points += [Point(number, index, leader.size) for index in families]
        guess, *costs = expected([Point(number, 0, leader.size), *points]).tolist()
        effects = {setting: each - guess for setting, each in zip(settings, costs, strict=False)}
        # Of several values at once, one that costs may hide one that gains.
        tried = frozenset[FineSetting]()
        for index, each in zip(families, costs[len(settings) :], strict=True):
            has = settings_of(arm, index)
            if len(has) == 1 or each - guess < _HIDES:
                tried |= has
        return cls(arm, same, cost, leader.index, families, effects, tried)

    def candidates(self, draws: random.Random) -> list[int]:
        """Returns families worth weighing: those one knob away from the leader or from the best guess, all gaining
        values together, several untried values at once, pairs that may do more together than each alone, and some that
        are drawn. A trial of several values costs no more than one of them, and shows any that gains much.
        """
        by_effect = sorted(self.effects, key=self.effects.__getitem__)
        gaining = [each for each in by_effect if self.effects[each] < 0 and each in self.tried]
        found = [self.leader, self._with(0, gaining), *departures(self.arm, self.leader), *departures(self.arm, 0)]
        untried = [each for each in by_effect if each not in self.tried]
        first = [each for place, each in enumerate(untried) if each[0] not in dict(untried[:place])]
        found += (self._with(self.leader, first[:count]) for count in range(2, len(first) + 1))
        found += (self._with(0, pair) for pair in combinations(sorted(self.tried), 2) if self._may_interact(*pair))
        for _ in range(_DRAWN):
            changed = (knob for knob in self.arm.fine if draws.random() < 0.5)
            found.append(self._with(self.leader, [(knob.path, repr(draws.choice(knob.values))) for knob in changed]))
        return list(dict.fromkeys(found))

    def _with(self, index: int, settings: Sequence[FineSetting]) -> int:
        # A family with some settings changed. The first of a knob counts.
        return index_of(self.arm, [*settings_of(self.arm, index), *reversed(settings)])

    def novelty(self, index: int, arms: Iterable["ArmProbes"]) -> float:
        """Returns how likely a family is to be a surprise, beside a value of which nothing is known. A value that did
        nothing in other arms, or a knob of which another value did nothing here, is a smaller hope.
        """
        settings = settings_of(self.arm, index)
        new = settings - self.tried
        if new:
            return sum(self._hope(setting, arms) for setting in sorted(new))
        had = [settings_of(self.arm, family) for family in self.families]
        pairs = (set(pair) for pair in combinations(settings, 2) if self._may_interact(*pair))
        return _TOGETHER if any(not any(pair <= each for each in had) for pair in pairs) else 0.0

    def _hope(self, setting: FineSetting, arms: Iterable["ArmProbes"]) -> float:
        # Values that did nothing: of this knob here, and this one in other arms.
        in_vain = sum(path == setting[0] and self.effects[path, value] > -_SURPRISE for path, value in self.tried)
        others = [arm for arm in arms if arm is not self and setting in arm.tried and arm.effects[setting] > -_SURPRISE]
        in_vain += sum(arm.same != self.same for arm in others)
        return (_SAME_SETTINGS if any(arm.same == self.same for arm in others) else 1.0) / (1 + in_vain)

    def _may_interact(self, one: FineSetting, other: FineSetting) -> bool:
        matter = all(abs(self.effects[each]) >= _MATTERS for each in (one, other))
        return one[0] != other[0] and (matter or frozenset((one[0], other[0])) in INTERACTING)


class Surprises:
    """What the study's arms have shown of surprises so far."""

    def __init__(self, arms: Iterable[ArmProbes]) -> None:
        effects = [each.effects[setting] for each in arms for setting in sorted(each.tried)]
        gains = [-effect for effect in effects if effect <= -_SURPRISE]
        self._share = (_SURPRISED + len(gains)) / (_TRIED + len(effects))
        self._gain = (_SURPRISED * _GAIN + sum(gains)) / (_SURPRISED + len(gains))

    def worth(self, novelty: Array, behind: Array) -> Array:
        """Returns the expected gain by surprise of points that are expected to be behind the best (logarithms). Gains
        are taken as exponential. It is 0 if a point is surely lost.
        """
        enough = np.exp(-np.maximum(behind, 0.0) / self._gain)  # the share of surprises that make it the best
        worth: Array = np.where(enough < _LOST, 0.0, self._share * novelty * self._gain * enough)
        return worth
