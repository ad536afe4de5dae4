"""Admission of trials: which of the chosen trials run, and which of them run alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from trial_lib.deepspeed_config.rules import broken_rules
from trial_lib.device.host.free_host_memory import available_bytes
from trial_lib.device.host.this_host import kind_of
from trial_lib.launch.trial import TrialPlan
from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.memory.host_memory import RESERVE, HostMemory
from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import ModelProfile, Outcome
from trial_lib.records.units import bytes_shown
from trial_lib.study.kept.history import Decided
from trial_lib.study.runner import NotRun
from trial_lib.study.setup import StudySetup


class Admission:
    """Holds chosen trials back, and picks the next one that may start.

    It admits everything until the profile trial has shown the model.

    Args:
        setup: the study's.

    Attributes:
        waiting: choices of the search that start before it is asked again.
    """

    def __init__(self, setup: StudySetup) -> None:
        self._device: Literal["cpu", "cuda"] = "cpu" if kind_of(setup.device).computes_on_the_processor else "cuda"
        self._slots = setup.slots
        # The free memory of other hosts is not known here.
        self._is_here = not setup.experiment.config.resources.hosts and setup.arguments.ray_address is None
        self._base_config: Mapping[str, Any] = {}
        self._model: ModelProfile | None = None
        self._memory: HostMemory | None = None
        self.waiting: list[Decided] = []
        self._running: dict[int, Candidate] = {}

    def profiled(
        self, model: ModelProfile | None, base_config: Mapping[str, Any], foreseen: Sequence[ForeseenArm] = ()
    ) -> None:
        """Takes the model that the profile trial found, the user's DeepSpeed configuration, and the foreseen arms."""
        self._model, self._base_config = model, base_config
        basis = None if model is None else MemoryBasis(model, base_config, self._slots, self._device, foreseen)
        self._memory = None if basis is None else HostMemory(basis)

    def next(self, ask: Callable[[], Decided | None]) -> Decided | None:
        """Returns the trials that may start now; None if nothing may start before another trial has ended.

        Args:
            ask: asks the search. A candidate that it returns counts as asked.
        """
        if self._runs_alone(self._running.values()):
            return None
        decided = self.waiting.pop(0) if self.waiting else ask()
        if decided is not None and self._running and self._runs_alone(each for _, each in decided.numbered):
            self.waiting.insert(0, decided)
            return None
        return decided

    def started(self, plans: Iterable[TrialPlan]) -> None:
        """Notes trials that run from now on."""
        self._running.update({plan.number: plan.candidate for plan in plans})

    def ended(self, number: int) -> None:
        """Notes that a trial has ended, or that a size of a sweep was withdrawn."""
        self._running.pop(number, None)

    def _runs_alone(self, candidates: Iterable[Candidate]) -> bool:
        """Returns whether no other trial may run beside these candidates.

        Offloaded states use the host's memory, its bandwidth, the buses to the devices, and the cores.
        """
        memory = self._memory
        return memory is not None and any(memory.needed(candidate) > 0 for candidate in candidates)

    def why_not(self, plan: TrialPlan) -> NotRun | None:
        """Returns why a trial is not run; None if it is.

        A trial is not run if its configuration breaks a rule that the user's keeps, or offloads more than the host has,
        or if a wrapper does not start the program with it.
        """
        if plan.refused is not None:
            return NotRun(*plan.refused)
        if self._model is None or self._memory is None or plan.purpose not in (Purpose.SEARCH, Purpose.CONFIRM):
            return None
        broken = _broken_rule(plan.candidate, self._base_config, self._model, self._device)
        if broken is not None and plan.purpose is Purpose.SEARCH:
            return NotRun(Outcome.INVALID, broken)
        return self._lack(plan.candidate, self._memory)

    def _lack(self, candidate: Candidate, memory: HostMemory) -> NotRun | None:
        """Returns that the host has no room for a candidate, by the profile trial or by its free memory now."""
        reason = memory.lack(candidate)
        if reason:
            return NotRun(Outcome.OUT_OF_HOST_MEMORY, f"Not tried: {reason}")
        # The user's configuration has run with as much. A sum that is too large may not stop this one.
        needed = memory.needed(candidate) * self._slots if memory.needed(candidate) > memory.own else 0.0
        free = available_bytes() if needed and self._is_here else None
        if free is None or needed <= (1 - RESERVE) * free:
            return None
        reason = (
            f"Not tried: it would keep {bytes_shown(needed)} in the host's memory, of which {bytes_shown(free)} are "
            "free now: other processes have the rest."
        )
        return NotRun(Outcome.OUT_OF_HOST_MEMORY, reason, from_outside=True)


def _broken_rule(
    candidate: Candidate,
    base_config: Mapping[str, Any],
    model: ModelProfile,
    device: Literal["cpu", "cuda"],
) -> str | None:
    """Returns why a candidate breaks a rule that the user's configuration keeps; None if it breaks none."""
    pipeline, replicas = model.pipeline_parallel, candidate.data_parallel_size
    layout: dict[str, Any] = {"slots": candidate.slots, "shape": model.shape}
    own = {rule.name for rule in broken_rules(base_config, device, pipeline, model.data_parallel_size, **layout)}
    rules = broken_rules(candidate.complete(base_config), device, pipeline, replicas, **layout)
    return next((rule.reason for rule in rules if rule.name not in own), None)
