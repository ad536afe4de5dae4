"""The micro-batch sizes that a search may use, under the kept global batch, divisors and limits."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from trial_lib.search.base import SearchProblem
from trial_lib.wire.errors import InputError

# Sizes with more significant bits than this are left out. Neighbours are then 6 to 12 % apart. Noise hides smaller
# differences, and large sizes stay multiples of powers of two, which suit matrix units.
_SIGNIFICANT_BITS = 4
_LARGEST = 2**20


@dataclass(frozen=True)
class BatchPolicy:
    """The rule that turns a micro-batch size into a batch, and lists the sizes.

    Attributes:
        train_batch_size: samples of an optimizer step, kept exactly. None leaves them free.
        gradient_accumulation_steps: the user's, for a free batch.
        data_parallel_size: model replicas.
        divisible_by: every micro-batch size is a multiple of it (samples).
        max_micro_batch: the largest size (samples); None for no limit but memory.
        only_micro_batch: the only size; None for any.
    """

    train_batch_size: int | None
    gradient_accumulation_steps: int
    data_parallel_size: int
    divisible_by: int = 1
    max_micro_batch: int | None = None
    only_micro_batch: int | None = None

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
        """Returns the policy on another number of model replicas. It keeps the same global batch.

        It may have no size. If the program sets the size, fewer replicas accumulate more of its batches.
        """
        return replace(self, data_parallel_size=replicas)

    @property
    def is_kept(self) -> bool:
        """Whether the samples of an optimizer step are kept."""
        return self.train_batch_size is not None

    def check(self) -> None:
        """Checks that there is a size.

        Raises:
            InputError: none satisfies the kept batch, the divisor and the limit together.
        """
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
    """Yields the multiples of a unit by numbers of few significant bits, ascending, up to the largest size."""
    step, factor = 1, 1
    while unit * factor <= _LARGEST:
        yield unit * factor
        factor += step
        if factor == step << _SIGNIFICANT_BITS:
            step *= 2


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
