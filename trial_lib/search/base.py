"""The interface of every search: ask and tell, within a budget."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trial_lib.deepspeed_config.layout import Replicas
from trial_lib.deepspeed_config.overrides import ACCUMULATION
from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.records.candidate import Candidate, Sweep, Withdrawal
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.search.expected_arms import ExpectedArm
from trial_lib.search.settings import SearchSettings
from trial_lib.search.shared_reasons import SharedReasons
from trial_lib.space.knobs import SearchSpace

# The largest size (samples) before any has run, and the largest ratio to a size that has run.
_LARGEST_FIRST, _GROWTH = 64, 8


def size_limit(largest_run: int, own: object) -> int:
    """Returns the largest micro-batch (samples) that may be tried next.

    Memory may have room for millions of samples, but a data set and a deadline do not.

    Args:
        largest_run: the largest size that has run; 0 if none has.
        own: the size of the user's configuration, if it is a number.
    """
    return max(_LARGEST_FIRST, _GROWTH * max(largest_run, own if isinstance(own, int) else 0))


@dataclass(frozen=True)
class FreeBatchGain:
    """The expected gain of the best candidate whose global batch is free.

    Attributes:
        candidate: the best micro-batch size for the winner's knobs.
        factor: the expected ratio of its samples per second to the winner's.
    """

    candidate: Candidate
    factor: float


@dataclass(frozen=True)
class SearchProblem:
    """The input of a search.

    Attributes:
        space: the lineages to draw from.
        profile: the findings of the profile trial.
        base_config: the user's DeepSpeed configuration, for its precision and gradient accumulation.
        slots: devices that a trial takes.
        device: `cuda` or `cpu`.
        train_batch_size: samples of an optimizer step that every candidate must have. None leaves them free.
        can_sweep: whether one process group can measure several micro-batch sizes of the program.
        only_micro_batch: the only micro-batch size (samples), if the program itself sets its batches. None for any.
        foreseen: the arms that foreseen runs have found; none if there were no such runs.
        expected: the arms of the plan that the study begins with; none without one.
    """

    space: SearchSpace
    profile: ModelProfile
    base_config: Mapping[str, Any]
    slots: int
    device: str = "cuda"
    train_batch_size: int | None = None
    can_sweep: bool = False
    only_micro_batch: int | None = None
    foreseen: tuple[ForeseenArm, ...] = ()
    expected: tuple[ExpectedArm, ...] = ()

    @cached_property
    def replicas(self) -> Replicas:
        """The model replicas of each candidate."""
        return Replicas(self.slots, self.profile.data_parallel_size, self.base_config)


class Search(ABC):
    """Proposes candidates and learns from their trials.

    A search is a deterministic function of its arguments, its seed and the calls of `ask`, `apply` and `tell` so far.
    Random choices are drawn from (seed, number of the ask) and nothing else. An `ask` that returns None changes
    nothing, so a history of candidates and results is complete.

    Example:
        >>> candidate = search.ask()  # doctest: +SKIP
        >>> search.tell(candidate, result)  # doctest: +SKIP
        >>> search.best  # doctest: +SKIP
        (candidate, result)
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem) -> None:
        """Starts with nothing asked for."""
        self.metric = SEARCH_METRICS[settings.metric]
        self.problem = problem
        self.space = problem.space
        self._seed = settings.seed
        self._budget = settings.max_trials - 1
        self._concurrency = settings.concurrency
        self._max_micro_batch = settings.max_micro_batch
        accumulation = problem.base_config.get(ACCUMULATION, "auto")
        self._accumulation = 1 if accumulation == "auto" else accumulation
        self._asked = 0
        self._best: tuple[Candidate, TrialResult] | None = None
        self._shared = SharedReasons(problem.space, problem.base_config)

    @abstractmethod
    def ask(self) -> Candidate | Sweep | None:
        """Returns the next candidate or sweep; None when `finished`, or while it needs the result of a running trial.

        Each candidate of a sweep is in flight until `tell` or `withdraw`.
        """

    @abstractmethod
    def apply(self, asked: Any) -> None:
        """Takes an ask from a record instead of asking. The search then is as if it had proposed it.

        `ask` would have proposed the same, unless the record comes from another version or other settings. Such a
        record is followed too.

        Args:
            asked: a candidate, or a sweep if the method asks for sweeps.
        """

    @abstractmethod
    def tell(self, candidate: Candidate, result: TrialResult) -> None:
        """Learns how a candidate's trial ended.

        Raises:
            KeyError: the candidate is not in flight.
        """

    def withdraw(self, candidate: Candidate, reason: Withdrawal) -> None:
        """Learns that a size of a sweep was not measured.

        Raises:
            KeyError: the candidate is not in flight.
        """
        raise NotImplementedError("this method asks for no sweeps")

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
        self._shared.tell(candidate, result, asked=False)

    @property
    def left_out(self) -> tuple[str, ...]:
        """One sentence for each exclusion that follows from two trials that failed alike."""
        return tuple(cause.sentence for cause in self._shared.found)

    def expected(self) -> Mapping[int, float]:
        """Returns the metric that candidates of completed trials are expected to have in training, by trial number.

        For a trial that is missing here, its reading is the expectation. A method without a model returns nothing.
        """
        return {}

    def freeing_gain(self) -> FreeBatchGain | None:
        """Returns the expected gain of a free batch; None if the batch is free, or the method has no model."""
        return None

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether the search has nothing more to propose and waits for nothing.

        A search that stops early is finished at once. The trials in flight can be cancelled, and may still be told.
        """

    @property
    def best(self) -> tuple[Candidate, TrialResult] | None:
        """The best completed trial so far, the earlier of equals; None if none has completed.

        A search that has finished without one has failed.
        """
        return self._best

    def _with_own_accumulation(self, knobs: Mapping[str, Any], micro_batch_size: int) -> Candidate:
        """Returns the candidate of some knobs at a micro-batch size, with the user's accumulation."""
        return Candidate(
            knobs=dict(knobs),
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=self._accumulation,
            slots=self.problem.slots,
            data_parallel_size=self.problem.replicas.of(knobs),
        )

    def _allowed(self, micro_batch_size: int) -> int:
        """Returns a size, or the largest allowed one if that is smaller."""
        return micro_batch_size if self._max_micro_batch is None else min(micro_batch_size, self._max_micro_batch)

    def _value(self, result: TrialResult) -> float | None:
        """Returns the metric of a completed trial; None for any other."""
        return result.metrics.get(self.metric.name) if result.outcome is Outcome.COMPLETED else None

    def _is_new_best(self, candidate: Candidate, result: TrialResult, value: float) -> bool:
        """Remembers the best completed trial, and returns whether this one is."""
        if self._best is not None and not self.metric.better(value, than=self._best[1].metrics[self.metric.name]):
            return False
        self._best = candidate, result
        return True
