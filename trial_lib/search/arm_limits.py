"""The exclusions that follow from the trials of arms: sizes that do not fit, settings that fail."""

from dataclasses import dataclass, field

from trial_lib.records.candidate import Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.base import size_limit
from trial_lib.search.cost_model import Point

_FAILURES_OF_AN_ARM = 2


@dataclass
class ArmLimits:
    """The sizes of one arm.

    Attributes:
        too_large: the smallest micro-batch size (samples) that ran out of memory; None if none did.
        withdrawn: the smallest size that a sweep predicted not to fit, until the arm has run again. No sweep goes
            there, but a single trial may, if the memory model allows it. None if there is none.
        failing: the smallest size that failed in a lineage whose smaller sizes had run. None if there is none.
        largest: the largest size that ran, by lineage.
    """

    too_large: int | None = None
    withdrawn: int | None = None
    failing: int | None = None
    largest: dict[int, int] = field(default_factory=dict)

    @property
    def bound(self) -> int | None:
        """The smallest size that is ruled out; None if none is.

        If nothing has run, that is half of the size that did not fit, because the arm's prediction was wrong.
        """
        too_large = self.too_large
        if too_large is not None and not self.largest:
            too_large = too_large // 2 + 1
        return min((size for size in (too_large, self.failing) if size is not None), default=None)

    def ran(self, index: int, size: int) -> None:
        """Learns that a size ran. A sweep's prediction no longer counts, because more is known now."""
        self.largest[index] = max(size, self.largest.get(index, 0))
        self.withdrawn = None

    def ran_out_of_memory(self, size: int) -> None:
        """Learns that a size did not fit."""
        self.too_large = min(size, self.too_large or size)

    def withdraw(self, size: int, reason: Withdrawal) -> None:
        """Learns that a sweep did not reach a size."""
        if reason is Withdrawal.MEMORY:
            self.withdrawn = min(size, self.withdrawn or size)

    def fail(self, size: int) -> None:
        """Learns that a size failed although smaller ones had run. A deadline may be too short for it."""
        self.failing = min(size, self.failing or size)


class Failures:
    """Lineages that failed for another reason than memory, and of which no size has run.

    Either the settings or the size are the cause. If two arms failed and nothing has run at such sizes, the size is
    taken as the cause. Otherwise a failure of large batches would rule out one arm after another.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._largest_run = 0
        self._out_of_data: int | None = None
        self._failed: dict[tuple[int, int], int] = {}
        self._lost: set[Point] = set()
        self._killed: dict[int, int] = {}

    def ran(self, size: int) -> None:
        """Learns that a size ran."""
        self._largest_run = max(self._largest_run, size)

    def size_limit(self, own: object) -> int:
        """Returns the largest size (samples) that may be tried.

        Args:
            own: as `size_limit` has it.
        """
        return size_limit(self._largest_run, own)

    def say_nothing(self, point: Point, result: TrialResult) -> bool:
        """Returns whether a trial's end says nothing: it was cancelled, or killed from outside for the first time.

        A second kill counts as a failure, so that the search does not ask for the candidate again and again. After one
        candidate has been killed twice, a kill at a size that nothing has run counts at once.
        """
        is_known = bool(self._killed) and point.size > self._largest_run
        if not result.from_outside or point in self._lost or (result.outcome is Outcome.CRASHED and is_known):
            return result.outcome is Outcome.CANCELLED
        self._lost.add(point)
        return True

    def fail(self, arm: int, index: int, size: int) -> None:
        """Learns that a size of a lineage failed."""
        self._failed[arm, index] = min(size, self._failed.get((arm, index), size))

    def kill(self, arm: int, size: int) -> None:
        """Learns that ranks of an arm are killed at a size. If two arms' are, the host's memory may be the cause."""
        self._killed[arm] = min(size, self._killed.get(arm, size))

    def ran_out_of_data(self, size: int) -> None:
        """Learns that the data are too few for a size. They are the same for every arm."""
        self._out_of_data = min(size, self._out_of_data or size)

    @property
    def bound(self) -> int | None:
        """The smallest size (samples) that no arm may use; None if there is none.

        It is the size for which the data were too few, or half of a size that failed or was killed.
        """
        killed = [size for size in self._killed.values() if size > self._largest_run]
        doubtful = [self._failed[lineage] for lineage in self._blamed_on_size] + (killed if len(killed) > 1 else [])
        half = max(2, min(doubtful) // 2 + 1) if doubtful else None
        data = self._out_of_data if (self._out_of_data or 0) > self._largest_run else None
        return min((size for size in (half, data) if size is not None), default=None)

    def is_out(self, arm: int, index: int) -> bool:
        """Returns whether a lineage has failed, or its arm as a whole has."""
        failed = [lineage for lineage in self._failed if lineage[0] == arm and lineage not in self._blamed_on_size]
        return (arm, index) in failed or len(failed) >= _FAILURES_OF_AN_ARM

    @property
    def _blamed_on_size(self) -> list[tuple[int, int]]:
        doubtful = [lineage for lineage, size in self._failed.items() if size > self._largest_run]
        return doubtful if len({arm for arm, _ in doubtful}) > 1 else []
