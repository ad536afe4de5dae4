"""The exclusions that follow from two failures of one reason: settings that both share and no completed trial has.
Pure.

A program that computes a gradient twice fails at every stage from 2 on. A missing optimizer fails in every candidate
that wants it. Each such candidate would cost a trial. Two that failed alike are compared in their stages, coarse knobs
and micro-batch sizes. The settings that both have, and no completed candidate has, are taken together as the cause.
Further failures narrow the cause, because another size or another knob that fails alike drops out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

from trial_lib.command.switches import place_of
from trial_lib.records.candidate import Candidate
from trial_lib.records.failure_cause import cause_of, without_log
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.space_coordinates import plain
from trial_lib.space.knobs import STAGE, SearchSpace, get_knob, leaves

# A busy machine may miss a deadline, and data may make a loss infinite.
_LIES_IN_SETTINGS = (Outcome.CRASHED, Outcome.INVALID)
_BAD_LUCK = re.compile(
    r"connection|address already in use|no space left|timed? ?out|signal|(?-i:\bSIG[A-Z]+\b)", re.IGNORECASE
)


@dataclass(frozen=True)
class _Settings:
    """The possible causes of a candidate's failure: its stage, and its coarse knobs by path."""

    stage: int
    knobs: frozenset[tuple[str, str]]


@dataclass
class _Failed:
    """Failures of one reason with one setting: the smallest micro-batch size (samples), and the trials' numbers."""

    size: int
    numbers: list[int]
    reason: str


@dataclass(frozen=True)
class SharedReason:
    """An exclusion, and its reason.

    Attributes:
        stages: the first and the last stage. None if the stage is not the cause.
        knobs: the coarse knobs by path, as text.
        size: the smallest micro-batch size (samples). None if all sizes are excluded.
        numbers: of two trials that failed so.
        reason: the reason of these trials.
    """

    stages: tuple[int, int] | None
    knobs: frozenset[tuple[str, str]]
    size: int | None
    numbers: tuple[int, int]
    reason: str

    def covers(self, stage: int, knobs: frozenset[tuple[str, str]]) -> bool:
        """Returns whether settings are excluded, at some size."""
        return (self.stages is None or self.stages[0] <= stage <= self.stages[1]) and self.knobs <= knobs

    def includes(self, other: "SharedReason") -> bool:
        """Returns whether this excludes everything that another one excludes."""
        stages = other.stages or (0, 3)
        is_wide = self.covers(stages[0], other.knobs) and self.covers(stages[1], other.knobs)
        return is_wide and (self.size is None or (other.size is not None and self.size <= other.size))

    @property
    def sentence(self) -> str:
        """The exclusion in words, for people."""
        words = [] if self.stages is None else [_stages(*self.stages)]
        words += [f"{_short(path)} {'off' if value == 'None' else value}" for path, value in sorted(self.knobs)]
        words += [] if self.size is None else [f"a micro-batch of {self.size} and more"]
        first, second = self.numbers
        return f"Left out after trials {first} and {second}, which failed alike: {' with '.join(words)}. {self.reason}"


def _short(path: str) -> str:
    return place_of(path).removeprefix("zero_optimization.").removesuffix(".device")


def _stages(first: int, last: int) -> str:
    if first == last:
        return f"ZeRO stage {first}"
    return f"ZeRO stage {first} and above" if last == 3 else f"ZeRO stages {first} to {last}"


class SharedReasons:
    """The failures of a search, and the exclusions that follow.

    Args:
        space: the search's.
        base_config: the user's DeepSpeed configuration.
    """

    def __init__(self, space: SearchSpace, base_config: Mapping[str, Any]) -> None:
        self._base_config = base_config
        self._paths = sorted({path for arm in space.arms for path, _ in leaves(arm.knobs)} - {STAGE})
        self._failed: dict[str, dict[_Settings, _Failed]] = {}
        self._largest_run: dict[_Settings, int] = {}
        self._found: tuple[SharedReason, ...] = ()

    @property
    def found(self) -> tuple[SharedReason, ...]:
        """The known exclusions, one for each reason and each cause."""
        return self._found

    def tell(self, candidate: Candidate, result: TrialResult, asked: bool = True) -> None:
        """Learns from a trial. If the search did not ask for it, only its completion counts."""
        settings = self._settings(candidate)
        if result.outcome is Outcome.COMPLETED:
            size = candidate.micro_batch_size
            self._largest_run[settings] = max(size, self._largest_run.get(settings, 0))
        elif not asked or result.outcome not in _LIES_IN_SETTINGS or result.from_outside:
            return
        else:
            reason = without_log(result.reason)
            if not reason or _BAD_LUCK.search(reason):
                return
            alike = self._failed.setdefault(cause_of(reason), {})
            failed = alike.setdefault(settings, _Failed(candidate.micro_batch_size, [], reason))
            failed.size = min(failed.size, candidate.micro_batch_size)
            failed.numbers.append(result.number)
        self._found = self._causes()

    def largest(self, knobs: Mapping[str, Any]) -> int | None:
        """Returns the largest allowed size (samples) with some knobs; None for any, 0 for none."""
        if not self._found:
            return None
        settings = self._settings(Candidate(knobs=dict(knobs), micro_batch_size=1, slots=1))
        covering = [one for one in self._found if one.covers(settings.stage, settings.knobs)]
        return min((0 if one.size is None else one.size - 1 for one in covering), default=None)

    def _settings(self, candidate: Candidate) -> _Settings:
        config = candidate.complete(self._base_config)
        values = ((path, plain(get_knob(config, path))) for path in self._paths)
        return _Settings(get_knob(config, STAGE, 0), frozenset((path, str(value)) for path, value in values))

    def _causes(self) -> tuple[SharedReason, ...]:
        found: list[SharedReason] = []
        for alike in self._failed.values():
            for one, other in combinations_with_replacement(alike, 2):
                cause = self._cause(one, alike[one], other, alike[other])
                if cause is not None and not any(known.includes(cause) for known in found):
                    found = [known for known in found if not cause.includes(known)] + [cause]
        return tuple(found)

    def _cause(self, one: _Settings, failed: _Failed, other: _Settings, also: _Failed) -> SharedReason | None:
        """Returns the settings that two failures share and no completed trial has; None if there are none."""
        numbers = failed.numbers[:2] if one == other else [failed.numbers[0], also.numbers[0]]
        if len(numbers) < 2:
            return None
        low, high = sorted((one.stage, other.stage))
        stages = (low, high) if all(not low <= run.stage <= high for run in self._largest_run) else None
        knobs = frozenset(
            knob for knob in one.knobs & other.knobs if all(knob not in run.knobs for run in self._largest_run)
        )
        if stages is None and not knobs:
            return None  # the cause may be the size, which the methods handle themselves
        size = min(failed.size, also.size)
        is_larger = all(size > largest for largest in self._largest_run.values())
        first, second = sorted(numbers)
        return SharedReason(
            stages, knobs, size if is_larger and self._largest_run else None, (first, second), failed.reason
        )
