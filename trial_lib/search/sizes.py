"""The micro-batch sizes that a search may try: by its policy, by memory, and by the trials so far."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.candidate import Candidate, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import SearchProblem
from zerotune.trial_lib.search.budgets import HostMemory, MemoryBasis
from zerotune.trial_lib.search.cost_model import Point
from zerotune.trial_lib.search.memory_model import MemoryModel

# Sizes under the kept global batch, divisors and limits.

# Sizes with more significant bits than this are left out. Neighbours are then 6 to 12 % apart. Noise hides smaller
# differences, and large sizes stay multiples of powers of two, which suit matrix units.
_SIGNIFICANT_BITS = 4
_LARGEST = 2**20


@dataclass(frozen=True)
class BatchPolicy:
    """The rule that turns a micro-batch size into a batch, and lists the sizes."""

    train_batch_size: int | None  # samples of an optimizer step, kept exactly. None leaves them free.
    gradient_accumulation_steps: int  # the user's, for a free batch
    data_parallel_size: int  # model replicas
    divisible_by: int = 1  # every micro-batch size is a multiple of it (samples)
    max_micro_batch: int | None = None  # the largest size (samples); None for no limit but memory
    only_micro_batch: int | None = None  # the only size; None for any

    @classmethod
    def of(cls, problem: SearchProblem, divisible_by: int, max_micro_batch: int | None) -> "BatchPolicy":
        """Returns the policy of a problem, possibly without a size (see `check`)."""
        accumulation = problem.base_config.get(ACCUMULATION, "auto")
        return cls(
            problem.train_batch_size,
            1 if accumulation == "auto" else accumulation,
            problem.replicas.own,
            divisible_by,
            max_micro_batch,
            problem.only_micro_batch,
        )

    def on(self, replicas: int) -> "BatchPolicy":
        """Keeps the global batch, possibly without a size. Fewer replicas accumulate more of a program's batches."""
        return replace(self, data_parallel_size=replicas)

    @property
    def is_kept(self) -> bool:
        return self.train_batch_size is not None

    def check(self) -> None:
        """Raises InputError if no size satisfies the kept batch, the divisor and the limit together."""
        if self._all:
            return
        limit = "" if self.max_micro_batch is None else f" of at most {self.max_micro_batch}"
        step = "" if self.divisible_by == 1 else f" that is a multiple of {self.divisible_by}"
        batch = (
            ""
            if self.train_batch_size is None
            else f" divides a global batch of {self.train_batch_size} samples over {self.data_parallel_size} replicas"
        )
        raise InputError(
            f"no {MICRO_BATCH}{limit}{step}{batch or ' exists'}.",
            where="the batch policy",
            remedy="Change --train-batch-size, --divisible-by or --max-micro-batch, or leave the batch free "
            "(--free-batch).",
        )

    def sizes(self, at_most: int = _LARGEST) -> tuple[int, ...]:
        """Returns the micro-batch sizes worth a trial (samples), ascending."""
        return self._all[: bisect_right(self._all, at_most)]

    def accumulation(self, micro_batch_size: int) -> int:
        """Returns the accumulation steps for one of the sizes. For another size they are too few."""
        if self.train_batch_size is None:
            return self.gradient_accumulation_steps
        return self.train_batch_size // (micro_batch_size * self.data_parallel_size)

    @cached_property
    def _all(self) -> tuple[int, ...]:
        limit = min(self.max_micro_batch or _LARGEST, _LARGEST)
        if self.only_micro_batch is not None:
            left = (self.train_batch_size or 0) % (self.only_micro_batch * self.data_parallel_size)
            return () if left else (self.only_micro_batch,)
        if self.train_batch_size is None:
            return tuple(size for size in _round_multiples(self.divisible_by) if size <= limit)
        per_replica, rest = divmod(self.train_batch_size, self.data_parallel_size)
        if rest:
            return ()
        return tuple(size for size in _divisors(per_replica) if size <= limit and size % self.divisible_by == 0)


def _round_multiples(unit: int) -> Iterator[int]:
    step, factor = 1, 1
    while unit * factor <= _LARGEST:
        yield unit * factor
        factor += step
        if factor == step << _SIGNIFICANT_BITS:
            step *= 2


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# The risk of running out of memory, and what a trial is worth with it.

# The share of trials that may run out of memory. Larger sizes of sweeps do not count, because the group checks them
# itself. Then the risk of a single trial: once more have failed, usually, and at most.
_SHARE, _LEAST, USUAL_RISK, _MOST = 0.02, 0.01, 0.02, 0.05
# The risk that is accepted if nothing safer is left.
EVEN_ODDS = 0.5
# If memory was foreseen, so many trials may have the most risk. Later ones have to earn it back.
_EARLY = 4


def memory_risk(asked: int, ran_out: int, in_flight: int, is_foreseen: bool = False) -> float:
    """Returns the probability of running out of memory that the next trial may have. If memory was foreseen, the first
    trials have the most, because a larger size gains most there. Later ones gain little by it.
    """
    left = _SHARE * (asked + 1) - ran_out - USUAL_RISK * in_flight
    if ran_out and left <= 0:
        return _LEAST
    if is_foreseen and asked < _EARLY:
        return _MOST
    spent = _EARLY * _MOST if is_foreseen else 0.0
    return min(_MOST, max(USUAL_RISK, left - spent))


def worth_of_sweep(gain: float, fits: float, larger: Sequence[tuple[float, float]]) -> float:
    """Returns the expected gain of a sweep, whose group goes on while the next size fits. Each larger size has its gain
    and its probability to fit, in ascending order.
    """
    worth, reached = gain, 1.0
    for next_gain, next_fits in larger:
        reached = min(reached, next_fits)
        worth += reached * max(0.0, next_gain - gain)
        gain = max(gain, next_gain)
    return fits * worth


# Sizes that probably fit into memory.

# The least probability that a size keeps the headroom, alone and as a later size of a sweep. A sweep's group stops when
# it predicts that a size will not fit.
_LIKELY, _FORESEEABLE = 0.4, 0.1
# Of many sizes, this many of the largest are weighed, and then every sixth.
_FITTING_SIZES_LARGEST, _EVERY = 10, 6


class FittingSizes:
    """Asks the memory models, and caches the answers. Whoever teaches `memory` or `host` calls `forget`."""

    def __init__(
        self,
        policy: BatchPolicy,
        problem: SearchProblem,
        headroom: float,
        memory: MemoryModel | None = None,
        host: HostMemory | None = None,
    ) -> None:
        basis = MemoryBasis(problem.profile, problem.base_config, problem.slots, problem.device, problem.foreseen)
        self.memory = memory or MemoryModel(basis, problem.space.coarse_switches)
        self.host = host or HostMemory(basis)
        self._replicas = problem.replicas
        self._policies = {policy.data_parallel_size: policy}
        self.own_policy = policy
        self._slots = problem.slots
        self._headroom = headroom
        self._largest: dict[tuple[int, int, int, float], int] = {}
        self._last: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        self._largest.clear()

    def keep_size(self, size: int) -> None:
        self.own_policy = replace(self.own_policy, only_micro_batch=size)
        self._policies.clear()
        self._last.clear()
        self.forget()

    def policy(self, knobs: Mapping[str, Any]) -> BatchPolicy:
        """Returns the batches that some knobs may have. Another layout may have none."""
        replicas = self._replicas.of(knobs)
        if replicas not in self._policies:
            self._policies[replicas] = self.own_policy.on(replicas)
        return self._policies[replicas]

    def candidate(self, knobs: Mapping[str, Any], size: int) -> Candidate:
        return self._of(self.policy(knobs), knobs, size)

    def sizes(self, knobs: Mapping[str, Any], name: tuple[int, int], at_most: int, risk: float) -> list[int]:
        """Returns the sizes worth weighing, descending: the largest ones that fit, and some of the smaller. The name is
        the family's key in the cache, the risk the highest allowed probability of running out of memory.
        """
        policy = self.policy(knobs)
        sizes = policy.sizes(at_most)
        asked = name[0], name[1], at_most, risk
        known = self._largest.get(asked)
        if known is None:

            def may_run(place: int) -> bool:
                sized = self._of(policy, knobs, sizes[place])
                return self.probability(sized) >= _LIKELY and self.memory.probability_fits(sized, 0.0) >= 1 - risk

            # A trial changes the answer by few sizes, if at all.
            known = leading(may_run, len(sizes), near=self._last.get(name, len(sizes) // 2))
            self._largest[asked] = self._last[name] = known
        fitting = sizes[:known][::-1]
        return [*fitting[:_FITTING_SIZES_LARGEST], *fitting[_FITTING_SIZES_LARGEST::_EVERY]]

    def foreseeable(self, knobs: Mapping[str, Any], above: int, at_most: int) -> list[int]:
        larger = [size for size in self.policy(knobs).sizes(at_most) if size > above]

        def is_out(size: int) -> bool:
            return self.probability(self.candidate(knobs, size)) < _FORESEEABLE

        return larger[: bisect_left(larger, True, key=is_out)]

    def steps(self, knobs: Mapping[str, Any], sizes: Sequence[int]) -> list[int]:
        """Returns the larger sizes that a sweep should try, ascending. The last is the largest with any hope. A group
        that has measured only one size mostly predicts that it will not fit. The largest size with even odds then
        covers most of the way.
        """

        def is_unlikely(size: int) -> bool:
            return self.probability(self.candidate(knobs, size)) < EVEN_ODDS

        # A larger size is never likelier to fit.
        likely = sizes[: bisect_left(sizes, True, key=is_unlikely)]
        return list(dict.fromkeys([*likely[-1:], *sizes[-1:]]))

    def probability(self, candidate: Candidate) -> float:
        """Returns how likely a candidate is to fit with the headroom; 0 if the host has no room for it."""
        if not self.host.fits(candidate):
            return 0.0
        return self.memory.probability_fits(candidate, self._headroom)

    def sweep(self, candidates: Sequence[Candidate]) -> Sweep:
        first = candidates[0]
        headroom = self.memory.group_headroom(first, self._headroom)
        return Sweep(tuple(candidates), self.memory.bytes_per_sample(first), headroom)

    def _of(self, policy: BatchPolicy, knobs: Mapping[str, Any], size: int) -> Candidate:
        return Candidate(
            knobs=dict(knobs),
            micro_batch_size=size,
            gradient_accumulation_steps=policy.accumulation(size),
            slots=self._slots,
            data_parallel_size=policy.data_parallel_size,
        )


def leading(holds: Callable[[int], bool], count: int, near: int) -> int:
    """Returns how many places from the first on hold. No place holds after one that does not. It asks about two places
    if the guess is right, and goes on in steps that double if it is not.
    """
    low, high, place, step = 0, count, near - 1, 1
    while low < high:
        is_between = low > 0 and high < count
        place = (low + high) // 2 if is_between else min(max(place, low), high - 1)
        if holds(place):
            low, place = place + 1, place + step
        else:
            high, place = place, place - step
        step *= 2
    return low


# Exclusions after trials: sizes that do not fit, settings that fail.

_FAILURES_OF_AN_ARM = 2


@dataclass
class ArmLimits:
    too_large: int | None = None  # the smallest micro-batch size (samples) that ran out of memory; None if none did
    # The smallest size that a sweep predicted not to fit, until the arm has run again. No sweep goes there, but a
    # single trial may, if the memory model allows it. None if there is none.
    withdrawn: int | None = None
    failing: int | None = None  # the smallest size that failed where smaller ones had run; None if there is none
    largest: dict[int, int] = field(default_factory=dict)  # the largest size that ran, by family

    @property
    def bound(self) -> int | None:
        """The smallest size that is ruled out; None if none is. If nothing has run, that is half of the size that did
        not fit, because the arm's prediction was wrong.
        """
        too_large = self.too_large
        if too_large is not None and not self.largest:
            too_large = too_large // 2 + 1
        return min((size for size in (too_large, self.failing) if size is not None), default=None)

    def ran(self, index: int, size: int) -> None:
        """A sweep's prediction no longer counts, because more is known now."""
        self.largest[index] = max(size, self.largest.get(index, 0))
        self.withdrawn = None

    def ran_out_of_memory(self, size: int) -> None:
        self.too_large = min(size, self.too_large or size)

    def withdraw(self, size: int, reason: Withdrawal) -> None:
        if reason is Withdrawal.MEMORY:
            self.withdrawn = min(size, self.withdrawn or size)

    def fail(self, size: int) -> None:
        """Learns that a size failed although smaller ones had run. A deadline may be too short for it."""
        self.failing = min(size, self.failing or size)


class Failures:
    """Families that failed for another reason than memory, and of which no size has run. Either the settings or the
    size are the cause. If two arms failed and nothing has run at such sizes, the size is taken as the cause. Otherwise
    a failure of large batches would rule out one arm after another.
    """

    def __init__(self) -> None:
        self.largest_run = 0
        self._out_of_data: int | None = None
        self._failed: dict[tuple[int, int], int] = {}
        self._lost: set[Point] = set()
        self._killed: dict[int, int] = {}

    def ran(self, size: int) -> None:
        self.largest_run = max(self.largest_run, size)

    def is_inconclusive(self, point: Point, result: TrialResult) -> bool:
        """Returns whether a trial's end teaches nothing: it was cancelled, or killed from outside for the first time. A
        second kill counts as a failure, so that the search does not ask for the candidate again and again. After one
        candidate has been killed twice, a kill at a size that nothing has run counts at once.
        """
        is_known = bool(self._killed) and point.size > self.largest_run
        if not result.from_outside or point in self._lost or (result.outcome is Outcome.CRASHED and is_known):
            return result.outcome is Outcome.CANCELLED
        self._lost.add(point)
        return True

    @property
    def inconclusive(self) -> int:
        """The trials that were killed from outside and taught nothing. They have not shown that their sizes fit."""
        return len(self._lost)

    def fail(self, arm: int, index: int, size: int) -> None:
        self._failed[arm, index] = min(size, self._failed.get((arm, index), size))

    def kill(self, arm: int, size: int) -> None:
        """Ranks of an arm are killed at a size. If those of two arms are, the host's memory may be the cause."""
        self._killed[arm] = min(size, self._killed.get(arm, size))

    def ran_out_of_data(self, size: int) -> None:
        self._out_of_data = min(size, self._out_of_data or size)

    @property
    def bound(self) -> int | None:
        """The smallest size (samples) that no arm may use; None if there is none. It is the size for which the data
        were too few, or half of a size that failed or was killed.
        """
        killed = [size for size in self._killed.values() if size > self.largest_run]
        doubtful = [self._failed[family] for family in self._blamed_on_size] + (killed if len(killed) > 1 else [])
        half = max(2, min(doubtful) // 2 + 1) if doubtful else None
        data = self._out_of_data if (self._out_of_data or 0) > self.largest_run else None
        return min((size for size in (half, data) if size is not None), default=None)

    def is_out(self, arm: int, index: int) -> bool:
        failed = [family for family in self._failed if family[0] == arm and family not in self._blamed_on_size]
        return (arm, index) in failed or len(failed) >= _FAILURES_OF_AN_ARM

    @property
    def _blamed_on_size(self) -> list[tuple[int, int]]:
        doubtful = [family for family, size in self._failed.items() if size > self.largest_run]
        return doubtful if len({arm for arm, _ in doubtful}) > 1 else []
