"""How switches of the program change the activations that it keeps. Pure.

Recomputation keeps the inputs of blocks instead of everything within them. Attention as written keeps its scores
(Korthikanti et al., arXiv 2205.05198, equations 1 and 2). A compiled model keeps nearly as much as the written one: it
needed 77.0 GiB instead of 82.4 (Llama 3.1 8B on 8 H100, torchtitan, docs/performance.md, December 2024).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

from trial_lib.memory.peak_regression import Prior
from trial_lib.wire.turned import ATTENTION, CHECKPOINTING, COMPILE_PLACES

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
# `tests/unit/memory/test_attention_as_kept.py` shows it again.
_UNSURE = frozenset(repr(value) for value in ("eager", "sdpa"))
# With every second of its blocks recomputed, a program keeps the others as without recomputation: half of it.
_HALF_OF = {(CHECKPOINTING, repr("every_second")): repr("none")}
# Such a switch changes no more than another arm does. On a CPU the compiler stays in the resident memory of a rank.
_LIKE_AN_ARM = {"cuda": frozenset(COMPILE_PLACES), "cpu": frozenset[str]()}


class Keeps(Enum):
    """The activations that a program with some switches keeps, beside those with others."""

    LESS, AS_MUCH, MORE, UNKNOWN = range(4)


def keeps(switches: Switches, other: Switches, surely: bool = False) -> Keeps:
    """Returns whether a program is expected to keep more or less activations with some switches than with others.

    Args:
        switches: of the program.
        other: those to compare with.
        surely: whether an order counts only if it holds for every program.
    """
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
    """What a program keeps beside tried switches.

    Attributes:
        keeps: less or more than with them.
        surely: whether that holds for every program.
        values: the tried values of the switches that decide memory, by their places.
        part: it keeps more than with them at the micro-batch size divided by this.
    """

    keeps: Keeps
    surely: bool
    values: Mapping[str, Any]
    part: int = 1


class TriedSwitches:
    """The switches of the trials that have ended."""

    def __init__(self) -> None:
        """Starts with none."""
        self._values: dict[Switches, dict[str, Any]] = {}
        self._completed: set[Switches] = set()
        self._around: dict[Switches, list[Beside]] = {}

    def note(self, switches: Switches, program: Mapping[str, Any], completed: bool) -> None:
        """Notes how a trial ended.

        Args:
            switches: those that decide memory.
            program: the values of all switches, by their places.
            completed: whether the trial did. Else it ran out of memory.
        """
        self._values.setdefault(switches, {place: program[place] for place, _ in switches})
        if completed:
            self._completed.add(switches)
        self._around.clear()

    def has_run(self, switches: Switches) -> bool:
        """Returns whether a trial with some switches has completed."""
        return switches in self._completed

    def around(self, switches: Switches) -> list[Beside]:
        """Returns the tried switches that bound what a program with others keeps, surely or as expected.

        Args:
            switches: those of the program.
        """
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
    """Returns the priors of the memory with other switches than typed.

    Args:
        usual: the priors with the switches as typed.
        beside: the activations that are kept, beside those as typed.
    """
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
