"""The interface of every search: ask and tell, within a budget."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement
from math import log, log1p
from statistics import NormalDist, median
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, Layout, Replicas
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, overwrite_deepspeed_config
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Sweep, Withdrawal
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult, cause_of, without_log
from zerotune.trial_lib.records.switches import place_of, unforeseen_switches
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.cost_model import HALF_SIZE, PlannedCosts, prior_costs
from zerotune.trial_lib.search.knobs import STAGE, Arm, SearchSpace, get_knob, leaves, plain
from zerotune.trial_lib.search.methods import SearchSettings
from zerotune.trial_lib.search.zero_settings import ArmKey, arm_key

# Exclusions after two failures of one reason: settings that both share and no completed trial has.

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
    stages: tuple[int, int] | None  # the first and the last stage. None if the stage is not the cause.
    knobs: frozenset[tuple[str, str]]  # the coarse knobs by path, as text
    size: int | None  # the smallest micro-batch size (samples). None if all sizes are excluded.
    numbers: tuple[int, int]  # of two trials that failed so
    reason: str  # the reason of these trials

    def covers(self, stage: int, knobs: frozenset[tuple[str, str]]) -> bool:
        return (self.stages is None or self.stages[0] <= stage <= self.stages[1]) and self.knobs <= knobs

    def includes(self, other: "SharedReason") -> bool:
        stages = other.stages or (0, 3)
        is_wide = self.covers(stages[0], other.knobs) and self.covers(stages[1], other.knobs)
        return is_wide and (self.size is None or (other.size is not None and self.size <= other.size))

    @property
    def sentence(self) -> str:
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
    """The failures of a search, and the exclusions that follow."""

    def __init__(self, space: SearchSpace, base_config: Mapping[str, Any]) -> None:
        self._base_config = base_config
        self._paths = sorted({path for arm in space.arms for path, _ in leaves(arm.knobs)} - {STAGE})
        self._failed: dict[str, dict[_Settings, _Failed]] = {}
        self._largest_run: dict[_Settings, int] = {}
        self.found: tuple[SharedReason, ...] = ()  # the known exclusions, one for each reason and each cause

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
        self.found = self._causes()

    def largest(self, knobs: Mapping[str, Any]) -> int | None:
        """Returns the largest allowed size (samples) with some knobs; None for any, 0 for none."""
        if not self.found:
            return None
        settings = self._settings(Candidate(knobs=dict(knobs), micro_batch_size=1, slots=1))
        covering = [one for one in self.found if one.covers(settings.stage, settings.knobs)]
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
        # The settings that two failures share and no completed trial has; None if there are none.
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


# The arms as a plan expects them: which comes first, in which order, and which cannot fit.


# Of the fastest launches of a grid (benchmarks/replay) half are within 7 % of a plan, so a plan is no surer than that.
_LEAST_APART = 1.2


@dataclass(frozen=True, kw_only=True)
class ExpectedArm:
    key: ArmKey  # of its configuration
    label: str  # such as `z3-offload-optimizer`
    micro_batch: int = 1  # samples, the fastest of those that fit
    samples_per_s: float = 0.0  # at that micro-batch; 0 if the plan does not say
    apart: float = 1.0  # the ratio of the ends of its speed's 90 % interval to its speed, beside other arms
    is_first: bool = False  # whether it is the plan's answer
    no_room: str = ""  # why it cannot fit here, as a clause; empty if it may
    switches: frozenset[str] = frozenset()  # places of switches that the plan's foreseen runs have set
    speeds: Mapping[int, float] = field(default_factory=dict)  # samples/s at other sizes too, if the plan says them

    @property
    def cost(self) -> float:
        """The logarithm of a sample's cost at a large micro-batch, up to a constant of the plan."""
        return -log(self.samples_per_s) - log1p(HALF_SIZE / self.micro_batch)

    @property
    def costs(self) -> PlannedCosts:
        """Those of a sample at each size that the plan says."""
        found = sorted({**self.speeds, self.micro_batch: self.samples_per_s}.items())
        deviation = log(max(self.apart, _LEAST_APART)) / NormalDist().inv_cdf(0.95)
        return PlannedCosts([size for size, _ in found], [-log(speed) for _, speed in found], deviation)


def switches_in(expected: Iterable[ExpectedArm]) -> frozenset[str]:
    """Returns the places of the program's switches that a plan has foreseen."""
    return frozenset(place for arm in expected for place in arm.switches)


def key_in_plan(config: Mapping[str, Any], base_config: Mapping[str, Any], foreseen: Collection[str]) -> ArmKey:
    """Returns the key that a plan has of a configuration's arm; an empty one if the layout is neither the user's nor
    one of foreseen switches. A plan does not record which switches are layouts.
    """
    others = {place: kind for place, kind in (base_config.get(LAYOUTS) or {}).items() if place not in foreseen}
    if Layout.of({**config, LAYOUTS: others}) != Layout.of({**base_config, LAYOUTS: others}):
        return ()
    return arm_key({key: value for key, value in config.items() if key != LAYOUTS}, foreseen)


def key_of(arm: Arm, base_config: Mapping[str, Any], foreseen: Collection[str] = ()) -> ArmKey:
    """Returns the key of an arm's best guess. A plan has other switches than as typed if it has foreseen them."""
    key = key_in_plan(overwrite_deepspeed_config(base_config, arm.family(0)), base_config, foreseen)
    return (*key, *unforeseen_switches(arm.knobs, base_config, foreseen))


def expected_costs(arms: Sequence[Arm], base_config: Mapping[str, Any], expected: Sequence[ExpectedArm]) -> list[float]:
    """Returns the expected cost of each arm, as a logarithm. The plan's speeds decide. An arm whose speed no plan says
    has the cost of the formulas, on the level of the others.
    """
    formula = prior_costs(arms)
    planned = {arm.key: arm.cost for arm in expected if arm.samples_per_s > 0}
    foreseen = switches_in(expected)
    found = [planned.get(key_of(arm, base_config, foreseen)) for arm in arms] if planned else [None] * len(arms)
    levels = [cost - by_formula for cost, by_formula in zip(found, formula, strict=True) if cost is not None]
    if not levels:
        return formula
    level = median(levels)
    return [by_formula + level if cost is None else cost for cost, by_formula in zip(found, formula, strict=True)]


def planned_costs(
    arms: Sequence[Arm], base_config: Mapping[str, Any], expected: Sequence[ExpectedArm]
) -> dict[int, PlannedCosts]:
    """Returns the costs of each arm whose speed a plan says, by the arm's number."""
    planned, foreseen = {arm.key: arm.costs for arm in expected if arm.samples_per_s > 0}, switches_in(expected)
    keys = [key_of(arm, base_config, foreseen) for arm in arms] if planned else []
    return {arm: planned[key] for arm, key in enumerate(keys) if key in planned}


def without_hopeless(
    space: SearchSpace, base_config: Mapping[str, Any], expected: Sequence[ExpectedArm], ran: Container[ArmKey]
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms that cannot fit, and a sentence for each of them. The space stays whole if no
    arm would be left.
    """
    cannot = {arm.key: arm.no_room for arm in expected if arm.no_room and arm.key not in ran}
    foreseen = switches_in(expected)
    keys = [(arm, key_of(arm, base_config, foreseen)) for arm in space.arms] if cannot else []
    kept = [arm for arm, key in keys if key not in cannot]
    if not kept or len(kept) == len(space.arms):
        return space, []
    sentences = [f"{arm.label} is not tried: by the plan {cannot[key]}" for arm, key in keys if key in cannot]
    return SearchSpace.of_arms(kept), sentences


# The largest size (samples) before any has run, and the largest ratio to a size that has run.
_LARGEST_FIRST, _GROWTH = 64, 8


def size_limit(largest_run: int, own: object) -> int:
    """Returns the largest micro-batch (samples) that may be tried next, by the largest that has run (0 for none).
    Memory may have room for millions of samples, but a data set and a deadline do not.
    """
    return max(_LARGEST_FIRST, _GROWTH * max(largest_run, own if isinstance(own, int) else 0))


@dataclass(frozen=True)
class FreeBatchGain:
    """The expected gain of the best candidate whose global batch is free."""

    candidate: Candidate  # the best micro-batch size for the winner's knobs
    factor: float  # the expected ratio of its samples per second to the winner's


@dataclass(frozen=True)
class SearchProblem:
    space: SearchSpace  # the families to draw from
    profile: ModelProfile  # the findings of the profile trial
    base_config: Mapping[str, Any]  # the user's DeepSpeed configuration, for its precision and gradient accumulation
    slots: int  # devices that a trial takes
    device: str = "cuda"  # `cuda` or `cpu`
    train_batch_size: int | None = None  # samples that each optimizer step must have; None for any
    can_sweep: bool = False  # whether one process group can measure several micro-batch sizes of the program
    only_micro_batch: int | None = None  # the only size (samples), if the program sets its batches; None for any
    foreseen: tuple[ForeseenArm, ...] = ()  # the arms that foreseen runs have found; none if there were no such runs
    expected: tuple[ExpectedArm, ...] = ()  # the arms of the plan that the study begins with; none without one

    @cached_property
    def replicas(self) -> Replicas:
        return Replicas(self.slots, self.profile.data_parallel_size, self.base_config)


class Search(ABC):
    """Proposes candidates and learns from their trials.

    A search is a deterministic function of its arguments, its seed and the calls of `ask`, `apply` and `tell` so far.
    Random choices are drawn from (seed, number of the ask) and nothing else. An `ask` that returns None changes
    nothing, so a history of candidates and results is complete.

    A method says what comes next (`_propose`), and learns from what has ended (`_learn`). The rest of it is optional.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        self.metric = SEARCH_METRICS[settings.metric]
        self.problem = problem
        self.space = problem.space
        self._seed = settings.seed
        self._budget = settings.max_trials - 1
        self._concurrency = settings.concurrency
        self._max_micro_batch = settings.max_micro_batch
        accumulation = problem.base_config.get(ACCUMULATION, "auto")
        self._accumulation = 1 if accumulation == "auto" else accumulation
        self._asks = 0  # candidates and sweeps so far
        self._asked = 0  # trials so far that count towards the budget
        self._in_flight: dict[tuple[str, int], int] = {}  # the number of its ask for each candidate that has not ended
        self._best: tuple[Candidate, TrialResult] | None = None
        self._shared = SharedReasons(problem.space, problem.base_config)
        self._changes = 0
        self._proposed: tuple[tuple[int, int], Candidate | Sweep | None] | None = None

    @abstractmethod
    def _propose(self) -> Candidate | Sweep | None:
        """The next candidate or sweep; None if nothing is left, or until a running trial has ended. It changes
        nothing. Budget and concurrency have room for it.
        """

    @abstractmethod
    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns how the trial of a candidate that was in flight has ended."""

    def _begin(self, candidate: Candidate) -> None:  # noqa: B027 - a method need not care
        """Learns that a candidate runs. It is the proposed one, unless it is from a record of another version."""

    def _take_back(self, candidate: Candidate, reason: Withdrawal) -> None:  # noqa: B027 - a method need not sweep
        """Learns that a size of a sweep was not measured."""

    # -- the history ---------------------------------------------------------------------------------------------

    def ask(self) -> Candidate | Sweep | None:
        """Returns the next candidate or sweep; None when `finished`, or while it needs the result of a running trial.
        Each candidate of a sweep is in flight until `tell` or `withdraw`.
        """
        asked = self._next()
        if asked is not None:
            self.apply(asked)
        return asked

    def apply(self, asked: Candidate | Sweep) -> None:
        """Takes an ask from a record instead of asking. The search then is as if it had proposed it. `ask` would have
        proposed the same, unless the record comes from another version or other settings. Such a record is followed
        too.
        """
        self._asks += 1
        for candidate in asked.candidates if isinstance(asked, Sweep) else (asked,):
            self._begin(candidate)
            self._asked += 1
            self._in_flight[candidate.key] = self._asks
        self._changes += 1

    def tell(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns how a candidate's trial ended. One that is not in flight is a `KeyError`."""
        del self._in_flight[candidate.key]
        self._changes += 1
        self._learn(candidate, result)

    def withdraw(self, candidate: Candidate, reason: Withdrawal) -> None:
        """Learns that a size of a sweep was not measured. It costs no trial, and may be asked for again. One that is
        not in flight is a `KeyError`.
        """
        del self._in_flight[candidate.key]
        self._asked -= 1
        self._changes += 1
        self._take_back(candidate, reason)

    def _next(self) -> Candidate | Sweep | None:
        # The answer of `ask`. A second try changes only the budget, on which the sizes of a sweep depend.
        if self._asked >= self._budget or len(set(self._in_flight.values())) >= self._concurrency:
            return None
        now = self._changes, self._asked
        if self._proposed is None or self._proposed[0] != now:
            self._proposed = now, self._propose()
        return self._proposed[1]

    def keep_size(self, size: int) -> None:
        """Proposes only this micro-batch size (samples) from now on, because the program feeds no other."""
        raise NotImplementedError("this method varies only the size")

    def spend(self) -> bool:
        """Takes one trial of the budget for a candidate that runs once more. Returns False if none is left."""
        if self._asked >= self._budget:
            return False
        self._asked += 1
        return True

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns from a trial that the search did not ask for: the profile, the user's configuration, older ones."""
        self._changes += 1
        self._shared.tell(candidate, result, asked=False)

    @property
    def left_out(self) -> tuple[str, ...]:
        """One sentence for each exclusion that follows from two trials that failed alike."""
        return tuple(cause.sentence for cause in self._shared.found)

    def expected(self) -> Mapping[int, float]:
        """Returns the metric that candidates of completed trials are expected to have in training, by trial number. For
        a trial that is missing here, its reading is the expectation. A method without a model returns nothing.
        """
        return {}

    def apart(self, one: Candidate, other: Candidate) -> tuple[float, float] | None:
        """Returns the logarithm of the expected cost of one candidate above another's, tried or not, and its standard
        deviation; None if the method has no model, or if the space has no such arm.
        """
        return None

    def freeing_gain(self) -> FreeBatchGain | None:
        """Returns the expected gain of a free batch; None if the batch is free, or the method has no model."""
        return None

    @property
    def finished(self) -> bool:
        """Whether the search has nothing more to propose and waits for nothing. A search that stops early is finished
        at once. The trials in flight can be cancelled, and may still be told.
        """
        return not self._in_flight and self._next() is None

    @property
    def best(self) -> tuple[Candidate, TrialResult] | None:
        """The best completed trial so far, the earlier of equals; None if none has completed. A search that has
        finished without one has failed.
        """
        return self._best

    def _with_own_accumulation(self, knobs: Mapping[str, Any], micro_batch_size: int) -> Candidate:
        return Candidate(
            knobs=dict(knobs),
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=self._accumulation,
            slots=self.problem.slots,
            data_parallel_size=self.problem.replicas.of(knobs),
        )

    def _allowed(self, micro_batch_size: int) -> int:
        # A size, or the largest allowed one if that is smaller.
        return micro_batch_size if self._max_micro_batch is None else min(micro_batch_size, self._max_micro_batch)

    def _value(self, result: TrialResult) -> float | None:
        # The metric of a completed trial; None for any other.
        return result.metrics.get(self.metric.name) if result.outcome is Outcome.COMPLETED else None

    def _is_new_best(self, candidate: Candidate, result: TrialResult, value: float) -> bool:
        # Remembers the best completed trial, and returns whether this one is.
        if self._best is not None and not self.metric.better(value, than=self._best[1].metrics[self.metric.name]):
            return False
        self._best = candidate, result
        return True
