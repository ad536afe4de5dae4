"""A world: what trials would show, without running any. Searches are replayed in it."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION
from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import SearchProblem

START_UP = ("start", "import", "initialize")
"""The phases that a sweep pays once."""


class World(ABC):
    """A problem, and how every candidate of it would end.

    Attributes:
        name: for people.
        problem: what searches are given, the same for all of them.
        submitted: the user's own configuration, which every study measures.
        largest_size: micro-batch sizes (samples) above it are not tried.
        noise: relative standard deviation of a trial's throughput around the truth.
    """

    name: str
    problem: SearchProblem
    submitted: Candidate
    largest_size: int
    noise: float

    @abstractmethod
    def run(self, candidate: Candidate, draws: random.Random) -> TrialResult:
        """Returns how a trial of a candidate would end: with noise, and with the seconds of its phases."""

    @abstractmethod
    def truth(self, candidate: Candidate) -> float | None:
        """Returns a candidate's throughput without noise, in samples/s over all ranks; None if it does not fit."""

    def profile(self, draws: random.Random) -> tuple[Candidate, TrialResult]:
        """Returns the profile trial: the submitted configuration at micro-batch 1, which makes one step."""
        candidate = self.candidate(self.submitted.knobs, 1)
        result = self.run(candidate, draws)
        phases = {name: seconds for name, seconds in result.phases.items() if name != "steps"}
        of_profile = {"purpose": Purpose.PROFILE, "profile": self.problem.profile, "phases": phases}
        return candidate, replace(result, **of_profile)

    @cached_property
    def best(self) -> float:
        """The throughput without noise of the best of all candidates, in samples/s."""
        sizes = range(1, self.largest_size + 1)
        return max(value for each in self.candidates(sizes) if (value := self.truth(each)) is not None)

    @cached_property
    def share_that_fails(self) -> float:
        """How many of the candidates of the grid do not fit, as a fraction."""
        fits = [self.truth(candidate) is not None for candidate in self.candidates(self.grid)]
        return 1 - sum(fits) / len(fits)

    @property
    @abstractmethod
    def grid(self) -> Sequence[int]:
        """The micro-batch sizes that stand for all in a count."""

    def candidates(self, sizes: Sequence[int]) -> Iterator[Candidate]:
        """Yields every family at each of some micro-batch sizes."""
        for arm in self.problem.space.arms:
            for index in range(arm.size):
                knobs = arm.family(index)
                for size in sizes:
                    yield self.candidate(knobs, size)

    def candidate(self, knobs: Mapping[str, object], size: int) -> Candidate:
        """Returns the candidate that a search would make of some knobs and a micro-batch size."""
        return Candidate(
            knobs=dict(knobs),
            micro_batch_size=size,
            gradient_accumulation_steps=self.problem.base_config[ACCUMULATION],
            slots=self.problem.slots,
            data_parallel_size=self.problem.replicas.of(knobs),
        )

    def completed(
        self,
        candidate: Candidate,
        throughput: float,
        step_times: Sequence[float],
        memory: Memory,
        phases: Mapping[str, float],
    ) -> TrialResult:
        """Returns the result of a trial that ran.

        Args:
            candidate: what ran.
            throughput: samples/s over all ranks; the other metrics follow from it.
            step_times: of the counted steps; only their spread matters.
            memory: bytes by rank.
            phases: seconds of each part.
        """
        replicas = self.problem.replicas.of(candidate.knobs)
        latency = candidate.micro_batch_size * candidate.gradient_accumulation_steps * replicas / throughput
        scale = latency / median(step_times)
        return self._result(
            candidate,
            Outcome.COMPLETED,
            phases,
            metrics={
                "throughput": throughput,
                "latency": latency,
                "measured_steps": float(len(step_times)),
                "FLOPS_per_gpu": self.problem.profile.flops_per_sample * throughput / self.problem.slots,
            },
            step_times=[scale * seconds for seconds in step_times],
            memory=memory,
            micro_batch_arrived=candidate.micro_batch_size,
        )

    def out_of_memory(self, candidate: Candidate, phases: Mapping[str, float]) -> TrialResult:
        """Returns the result of a trial that did not fit."""
        return self._result(candidate, Outcome.OUT_OF_MEMORY, phases, reason="It ran out of memory.")

    def crashed(self, candidate: Candidate, phases: Mapping[str, float]) -> TrialResult:
        """Returns the result of a trial whose program ended with an error."""
        return self._result(candidate, Outcome.CRASHED, phases, reason="The program ended with an error.")

    def _result(self, candidate: Candidate, outcome: Outcome, phases: Mapping[str, float], **more: Any) -> TrialResult:
        return TrialResult(
            trial_id=self.name,
            number=0,
            purpose=Purpose.SEARCH,
            config_hash=candidate.family,
            outcome=outcome,
            phases=dict(phases),
            **more,
        )
