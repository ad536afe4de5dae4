"""The micro-batch sizes of a lineage that probably fit into memory."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trial_lib.memory.host_memory import HostMemory
from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.memory.memory_model import MemoryModel
from trial_lib.records.candidate import Candidate, Sweep
from trial_lib.search.base import SearchProblem
from trial_lib.search.batch_policy import BatchPolicy
from trial_lib.search.memory_risk import EVEN_ODDS

# The least probability that a size keeps the headroom, alone and as a later size of a sweep. A sweep's group stops when
# it predicts that a size will not fit.
_LIKELY, _FORESEEABLE = 0.4, 0.1
# Of many sizes, this many of the largest are weighed, and then every sixth.
_LARGEST, _EVERY = 10, 6


class FittingSizes:
    """Asks the memory model, and caches its answers until it learns.

    Attributes:
        own_policy: the batches of the user's own layout.
        memory: the model of the device's memory. A caller that teaches it calls `forget`.
        host: the budget of the host's memory, for offloaded states. A caller that teaches it calls `forget`.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        problem: SearchProblem,
        headroom: float,
        memory: MemoryModel | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Starts with given models, or with new ones from the profile and the foreseen runs."""
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
        """Drops all cached answers, because the model has learned."""
        self._largest.clear()

    def keep_size(self, size: int) -> None:
        """Drops all sizes but one."""
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
        """Returns the candidate of some knobs at a micro-batch size."""
        return self._of(self.policy(knobs), knobs, size)

    def sizes(self, knobs: Mapping[str, Any], name: tuple[int, int], at_most: int, risk: float) -> list[int]:
        """Returns the sizes worth weighing, descending: the largest ones that fit, and some of the smaller.

        Args:
            knobs: of the lineage.
            name: of the lineage, as the key of the cache.
            at_most: the largest size (samples) of interest.
            risk: the highest allowed probability of running out of memory.
        """
        policy = self.policy(knobs)
        sizes = policy.sizes(at_most)
        asked = name[0], name[1], at_most, risk
        known = self._largest.get(asked)
        if known is None:
            # A trial changes the answer by few sizes, if at all.
            known = leading(
                lambda place: self._may_run(self._of(policy, knobs, sizes[place]), risk),
                len(sizes),
                near=self._last.get(name, len(sizes) // 2),
            )
            self._largest[asked] = self._last[name] = known
        fitting = sizes[:known][::-1]
        return [*fitting[:_LARGEST], *fitting[_LARGEST::_EVERY]]

    def foreseeable(self, knobs: Mapping[str, Any], above: int, at_most: int) -> list[int]:
        """Returns larger sizes that may fit as well, ascending."""
        larger = [size for size in self.policy(knobs).sizes(at_most) if size > above]

        def is_out(size: int) -> bool:
            return self.probability(self.candidate(knobs, size)) < _FORESEEABLE

        return larger[: bisect_left(larger, True, key=is_out)]

    def steps(self, knobs: Mapping[str, Any], sizes: Sequence[int]) -> list[int]:
        """Returns the larger sizes that a sweep should try, ascending.

        The last is the largest with any hope. A group that has measured only one size mostly predicts that it will not
        fit. The largest size with even odds then covers most of the way.

        Args:
            knobs: of the lineage.
            sizes: the larger ones, ascending.
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
        """Returns a sweep of some candidates, in the ascending order of their sizes."""
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

    def _may_run(self, candidate: Candidate, risk: float) -> bool:
        return self.probability(candidate) >= _LIKELY and self.memory.probability_fits(candidate, 0.0) >= 1 - risk


def leading(holds: Callable[[int], bool], count: int, near: int) -> int:
    """Returns how many places from the first on hold. No place holds after one that does not.

    It asks about two places if the guess is right, and goes on in steps that double if it is not.

    Args:
        holds: whether a place holds, which is expensive to find out.
        count: of all places.
        near: the guess.
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
