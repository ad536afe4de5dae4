"""A lineage while it is searched: its open range of micro-batch sizes, and its results."""

from dataclasses import dataclass
from typing import Any

from trial_lib.records.candidate import Candidate


@dataclass(eq=False)
class Lineage:
    """One setting of the knobs other than the micro-batch size. Its sizes are searched trial after trial.

    Attributes:
        knobs: in the DeepSpeed configuration's own shape.
        stage: its ZeRO stage.
        lo: the smallest micro-batch size (samples) still worth trying.
        hi: the largest size worth trying. No size is left once it is below `lo`.
        trials: how many of its trials have ended.
        in_flight: trials that were asked for and have not ended. Only a recorded history has more than one.
        out_of_memory: whether one of its sizes did not fit.
        best: the best metric of its trials.
        rung: the ASHA rung it is in; 0 with other methods.
    """

    knobs: dict[str, Any]
    stage: int
    lo: int
    hi: int
    trials: int = 0
    in_flight: int = 0
    out_of_memory: bool = False
    best: float | None = None
    rung: int = 0

    @property
    def has_sizes_left(self) -> bool:
        """Whether a micro-batch size is left to try."""
        return self.lo <= self.hi

    def ran(self, micro_batch_size: int) -> None:
        """Learns that a size ran, so that only larger ones matter."""
        self.lo = max(self.lo, micro_batch_size + 1)

    def ran_out_of_memory(self, micro_batch_size: int) -> None:
        """Learns that a size did not fit, so that no larger one will."""
        self.out_of_memory = True
        self.end_below(micro_batch_size)

    def end_below(self, micro_batch_size: int) -> None:
        """Leaves only smaller sizes to try."""
        self.hi = min(self.hi, micro_batch_size - 1)

    def end(self) -> None:
        """Leaves nothing to try."""
        self.hi = self.lo - 1


@dataclass(frozen=True)
class Proposal:
    """A candidate, with the lineage it belongs to and the range of sizes it was taken from.

    Attributes:
        candidate: the candidate to run.
        lineage: its lineage.
        hi: the largest size that the lineage held open when the candidate was chosen.
    """

    candidate: Candidate
    lineage: Lineage
    hi: int
