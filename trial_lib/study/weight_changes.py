"""Whether the first updates of two configurations change the weights alike, and which difference would show. Pure.

Ranks bring projections of the weights' change and of the optimizer's momenta by module, and the norms of the gradients
(`trial_lib/rank/first_steps.py`). They differ between two configurations that train alike, because rounding differs.
Adam makes that large: an element whose gradient is near 0 moves as far as any other, in the direction of its rounding.
No formula knows how many there are. So your configuration is measured once more on the same samples, in other rounding:
each weight is moved by one unit in its last place first, and other random numbers are drawn. The differences between
both are the spread that a candidate may have.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.messages.statistics import t_quantile
from zerotune.trial_lib.records.result import TrialResult

# Unit roundoffs: half the distance of two neighbouring numbers, relative to them
_ROUNDOFFS = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_NARROWER = 2.0**-4  # of any other format, such as those of 8 bits
_SECTIONS = (("bf16", "bfloat16"), ("fp16", "float16"), ("amp", "float16"), ("torch_autocast", "bfloat16"))
# The spread is that of one pair. A module's has eight numbers. A second such spread is over three times the first in 1
# of 370 cases (F distribution). The whole model's has many, and a factor of two is for roundings of another kind.
_OF_MODULE, _OF_WHOLE = 3.0, 2.0
# Times that, if the pair is of two cuts of the batch: what the samples of one step do differs from step to step.
_OF_CUT = 2.0
_NUMBERS = 8  # of a module
# The least error of a gradient: a sum of a million terms in 32 bits, in another order, differs by the roundoff times
# the root of their number. Adam turns an element the other way whose gradient is below its error e, a share of 0.8 e of
# gradients with a normal distribution. Half of them differ by twice their change, so the whole by the root of 1.6 e.
_OF_SUMS = 2.0**-14
_TURNED = 1.6
_TURNED_AWAY = 0.01  # of candidates that only weigh the samples of a step otherwise
# From other weights or on other samples one training may learn up to twice as fast.
_FASTER = 2.0


def roundoff(config: Mapping[str, Any], formats: Collection[str]) -> float:
    """The unit roundoff of the coarsest format that a program computes in.

    `formats` are of its code; `config` is the complete DeepSpeed configuration.
    """
    named = [each for name, each in _SECTIONS if config.get(name) and dict(config[name]).get("enabled", True)]
    return max(_ROUNDOFFS.get(name, _NARROWER) for name in (*formats, *named, "float32"))


@dataclass(frozen=True)
class FirstUpdates:
    """What a trial shows of its first updates."""

    norms: Sequence[float] = ()  # of the gradients
    change: WeightChange | None = None

    @classmethod
    def of(cls, result: TrialResult) -> "FirstUpdates":
        return cls(result.gradient_norms, result.weight_change)


@dataclass(frozen=True)
class Gap:
    """The relative differences between two courses, pooled over their rounds."""

    modules: Sequence[str]
    by_module: Sequence[float]
    whole: float
    # The logarithms of the ratios of their sizes
    sizes: Sequence[float]
    size: float

    @classmethod
    def between(cls, theirs: Sequence[Sequence[Sequence[float]]], ours: Any, names: Sequence[str]) -> "Gap":
        """Of the same rounds; each has rows by module."""
        apart = [
            math.hypot(*(b - a for one, other in pairs for a, b in zip(one, other, strict=True)))
            for pairs in _pairs(theirs, ours)
        ]
        mine, found = (
            [math.hypot(*(value for round_ in course for value in round_[place])) for place in range(len(names))]
            for course in (theirs, ours)
        )
        whole = math.hypot(*mine)
        # A module that hardly changes is measured by the whole.
        least = 1e-6 * whole or 1.0
        sizes = [_log_ratio(b, a) if max(a, b) > least else 0.0 for a, b in zip(mine, found, strict=True)]
        return cls(
            names,
            [gap / max(size, least) for gap, size in zip(apart, mine, strict=True)],
            math.hypot(*apart) / (whole or 1.0),
            sizes,
            _log_ratio(math.hypot(*found), whole),
        )


def _pairs(theirs: Sequence[Any], ours: Sequence[Any]) -> Iterable[list[tuple[Any, Any]]]:
    for place in range(len(theirs[0])):
        yield [(one[place], other[place]) for one, other in zip(theirs, ours, strict=True)]


def _log_ratio(found: float, wanted: float) -> float:
    return math.log(max(found, 1e-300) / max(wanted, 1e-300)) if found or wanted else 0.0


@dataclass(frozen=True)
class Allowance:
    """The differences that rounding and random numbers explain."""

    whole: float
    by_module: Sequence[float]
    size: float
    sizes: Sequence[float]

    @classmethod
    def of(cls, spread: Gap, floor: float, times: float = 1.0) -> "Allowance":
        # A frozen module has no spread. One whose gradients are nothing but rounding may differ from itself altogether.
        typical = median(list(filter(None, spread.by_module)) or [0.0])
        # In a small module an element that turns is rare, and may not have turned in the one pair.
        modules = [max(each, typical, spread.whole) for each in spread.by_module]
        # The sizes of two changes differ less than the changes: what is across them hardly counts.
        size = max(abs(spread.size), spread.whole / math.sqrt(_NUMBERS * len(modules)))
        return cls(
            times * _OF_WHOLE * spread.whole + floor,
            [times * _OF_MODULE * each + floor for each in modules],
            times * _OF_WHOLE * size + floor,
            [
                times * _OF_MODULE * max(abs(own), each / math.sqrt(_NUMBERS)) + floor
                for own, each in zip(spread.sizes, modules, strict=True)
            ],
        )

    def fault(self, gap: Gap, what: str) -> str:
        """Which difference is too large, as a clause; empty if none is."""
        every = [("", gap.whole, self.whole, gap.size, self.size)]
        rows = zip(gap.modules, gap.by_module, self.by_module, gap.sizes, self.sizes, strict=True)
        for name, apart, allowed, size, allowed_size in (*every, *rows):
            of = f"{what} of {name}" if name else what
            if apart > allowed:
                return f"{of} are {shown(apart)} apart ({shown(allowed)} is within rounding)"
            if abs(size) > allowed_size:
                return f"{of} are {math.exp(size):.3g} times yours ({shown(allowed_size)} is within rounding)"
        return ""


def shown(share: float) -> str:
    """A share in percent, for a sentence."""
    return f"{100 * share:.{0 if share >= 0.1 else 2}{'f' if share >= 0.1 else 'g'}} %"


@dataclass(frozen=True)
class WeightVerdict:
    """How the first updates compare."""

    fault: str = ""  # the difference that is too large, as a clause; empty if none is
    updates: int = 0  # that the weights were compared after; 0 if they were not
    # The shares by which the change of all weights, and of one module's, would have had to differ to be seen
    seen: tuple[float, float] = (math.inf, math.inf)
    size: float = math.inf  # the share by which its size would have had to
    why: str = ""  # they were not compared, as a clause
    slack: float = 0.0  # by which they differ because Adam counts other updates


def judge(
    own: Sequence[FirstUpdates],
    other: Sequence[FirstUpdates],
    again: tuple[FirstUpdates, FirstUpdates] | None,
    unit: float,
    factor: float = 1.0,
    cut_factor: float | None = None,
) -> WeightVerdict:
    """Compares the same rounds of two configurations.

    `again`: your configuration and the same in other rounding, in one round. `unit`: as `roundoff` has it. `factor`:
    the program's own, by which the gradients differ. `cut_factor`: by which those of `again` do, of
    which the second cut the batch as the candidate does; None if both cut it as you do.
    """
    pairs = [(mine, its) for mine, its in zip(own, other, strict=False) if mine.change and its.change]
    changes = [each.change for pair in (*pairs, again or ()) for each in pair if each.change]
    if not pairs:
        return WeightVerdict(why="it could not be read")
    slack = max(_slack(mine, its) for mine, its in zip(changes[::2], changes[1::2], strict=False))
    if again is None or len(changes) < 2 * len(pairs) + 2:
        return WeightVerdict(why="your configuration was not measured in other rounding", slack=slack)
    if not any(map(any, itertools.chain(*(change.sums for change in changes)))):
        return WeightVerdict(why="no weight has changed so far, as in a warm-up of the learning rate", slack=slack)
    error = max(unit, _OF_SUMS)
    floor = 2.0 * error + slack
    fault, found = "", WeightVerdict(updates=changes[0].updates, slack=slack)
    for kind, what, factors in (
        ("sums", "the changes of the weights", [1.0]),
        ("momenta", "the gradients", [factor, 1.0]),
    ):
        names, rows = _rows(changes, kind)
        if not all(rows):
            continue
        mine, its = rows[0:-2:2], rows[1:-2:2]
        turned = 0.0 if kind == "momenta" or changes[0].is_linear else math.sqrt(_TURNED * error)
        own_factors = [1.0] if kind == "sums" else [cut_factor or 1.0, 1.0]
        spreads = [Gap.between(_times(rows[-2:-1], each), rows[-1:], names) for each in own_factors]
        times = 1.0 if cut_factor is None else _OF_CUT
        allowance = Allowance.of(min(spreads, key=lambda gap: gap.whole), floor + turned, times)
        # Clipping takes the program's factor away.
        faults = [allowance.fault(Gap.between(_times(mine, each), its, names), what) for each in factors]
        fault = fault or (faults[0] if all(faults) else "")
        if kind == "sums":
            seen = allowance.whole, max(allowance.by_module)
            found = replace(found, seen=seen, size=-math.expm1(-allowance.size))
    return replace(found, fault=fault or _norms_apart(pairs, again, factor, cut_factor, floor))


def _rows(changes: Sequence[WeightChange], kind: str) -> tuple[Sequence[str], list[Any]]:
    # The rows of each by module; the whole model's if modules have other names, because projections add up.
    rows: list[Any] = [getattr(change, kind) for change in changes]
    if len({tuple(change.modules) for change in changes}) > 1:
        return [""], [[[math.fsum(column) for column in zip(*each, strict=True)]] if each else [] for each in rows]
    return changes[0].modules, rows


def _times(course: Sequence[Any], factor: float) -> list[Any]:
    return [[[factor * value for value in row] for row in one] for one in course]


def _slack(mine: WeightChange, its: WeightChange) -> float:
    # By how much Adam's correction of its bias differs: at stage 0 in 16 bits DeepSpeed makes an update of nothing
    # first (deepspeed/runtime/fp16/fused_optimizer.py), and Adam counts it.
    pairs = zip(mine.corrections, its.corrections, strict=False)
    return max((abs(other / own - 1.0) for own, other in pairs if own), default=0.0)


def _norms_apart(
    pairs: Sequence[tuple[FirstUpdates, FirstUpdates]],
    again: tuple[FirstUpdates, FirstUpdates],
    factor: float,
    cut_factor: float | None,
    floor: float,
) -> str:
    def apart(mine: FirstUpdates, its: FirstUpdates, times: float) -> list[float]:
        both = zip(mine.norms, its.norms, strict=False)
        return [math.log(b / (times * a)) for a, b in both if a > 0.0 and b > 0.0]

    spread = apart(*again, cut_factor or 1.0)
    if not spread:
        return ""
    found = [each for mine, its in pairs for each in apart(mine, its, factor)]
    width = _OF_MODULE
    if cut_factor is not None and found:
        # Every step has other samples, which another cut weighs otherwise: the largest of many draws from few.
        width = t_quantile(1.0 - _TURNED_AWAY / (2 * len(found)), len(spread))
    allowed = width * math.sqrt(fmean(each**2 for each in spread)) + floor
    worst = max(found, key=abs, default=0.0)
    if abs(worst) <= allowed:
        return ""
    return f"the norms of the gradients are {math.exp(worst):.3g} times yours ({shown(allowed)} is within rounding)"


def far_apart(own: Sequence[FirstUpdates], other: Sequence[FirstUpdates]) -> str:
    """As a clause, that the weights change too differently in size, from other weights or on other samples."""
    sizes = [
        math.sqrt(fmean(sum(value**2 for row in change.sums for value in row) for change in changes))
        for course in (own, other)
        if (changes := [each.change for each in course if each.change])
    ]
    if len(sizes) < 2 or not any(sizes) or abs(_log_ratio(sizes[1], sizes[0])) <= math.log(_FASTER):
        return ""
    return f"the change of the weights is {sizes[1] / sizes[0] if sizes[0] else math.inf:.3g} times as large as yours"
