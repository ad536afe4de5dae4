"""Parts of a measurement that a rank reports: how samples arrive, and where the time of a step goes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

# How samples show in the batches that arrive.


@dataclass(frozen=True)
class Arrival:
    """The relation between samples and batches, as the program as typed has shown it."""

    # Rows of one sample (two in a preference trainer). 0 if a row holds several samples, as in sequences that are
    # packed without padding.
    rows_per_sample: int = 1
    # Whether the number of samples differs from micro-batch to micro-batch. Each row is then a sample.
    varies: bool = False
    typed_micro_batch: int = 1  # the micro-batch size of the program as typed
    typed_tokens: int | None = None  # tokens in its first micro-batch; None if the batches show none
    # The dimension of a batch's first tensor that has the rows: 0, or 1 for `(sequence, batch, ...)`
    dimension: int = 0
    # `rows_per_sample` if the other of these two dimensions has the rows; 0 if it cannot. A tensor of one size may be
    # read both ways. The right reading is the one that follows another size.
    other_rows_per_sample: int = 1
    typed_accumulation: int = 1  # the accumulation of the engine of the program as typed
    typed_micro_batches: int | None = None  # micro-batches of its first optimizer step; None if unknown

    @classmethod
    def of_typed(cls, micro_batch: int, sizes: Sequence[int], tokens: int | None) -> "Arrival":
        """`sizes` are of the first tensor, in the one or two dimensions that may have the rows. None: no `tokens`."""
        first, second = (*sizes, 0)[:2]
        rows_per_sample = first // micro_batch if first % micro_batch == 0 else 1
        if first == 1 < micro_batch and tokens is not None:
            rows_per_sample = 0
        other = second // micro_batch if second % micro_batch == 0 and rows_per_sample else 0
        found = cls(rows_per_sample, typed_micro_batch=micro_batch, typed_tokens=tokens, other_rows_per_sample=other)
        if first == micro_batch != second:
            return replace(found, other_rows_per_sample=0)
        if other and second == micro_batch != first:
            return replace(found._turned(), other_rows_per_sample=0 if first % micro_batch else rows_per_sample)
        return found

    def at(self, asked: int, sizes: Sequence[int], tokens: int | None) -> "Arrival":
        """The relation that a trial's first micro-batch shows: if only the other dimension follows, it has the rows."""
        if self.varies or not self.other_rows_per_sample or len(sizes) < 2:
            return self
        readings = (self, self._turned())
        found = [each for each in readings if each.follows(asked, sizes[each.dimension], tokens)]
        return replace(found[0], other_rows_per_sample=0) if found else self

    def _turned(self) -> "Arrival":
        return replace(
            self,
            dimension=1 - self.dimension,
            rows_per_sample=self.other_rows_per_sample,
            other_rows_per_sample=self.rows_per_sample,
        )

    def rows(self, asked: int) -> int:
        return asked * max(1, self.rows_per_sample)

    def samples(self, rows: float, asked: float) -> float:
        """Returns the samples in some micro-batches of so many rows together; `asked` is the sum of their sizes."""
        if self.varies:
            return rows
        return rows / self.rows_per_sample if self.rows_per_sample else asked

    def follows(self, asked: int, rows: int, tokens: int | None) -> bool:
        """Whether a micro-batch has the requested size; True if the batch does not show it. `tokens` are in `rows`."""
        if self.varies:
            return True
        if self.rows_per_sample:
            return rows == self.rows(asked)
        if tokens is None or not self.typed_tokens:
            return True
        # Lengths differ from sample to sample.
        return _follows(tokens, self.typed_tokens, asked / self.typed_micro_batch)

    def accumulates(self, asked: int, micro_batches: int) -> bool:
        """Whether an optimizer step has followed the requested accumulation; True if it does not show."""
        if not self.typed_micro_batches or not micro_batches:
            return True
        # At the end of its data a program may step early.
        return _follows(micro_batches, self.typed_micro_batches, asked / self.typed_accumulation)


def _follows(found: int, typed: int, growth: float) -> bool:
    if growth == 1:
        return True
    expected = typed * growth
    apart = max(found / expected, expected / found)
    return apart < max(found / typed, typed / found) or apart < 2**0.5


# Where the time of an optimizer step goes: the parts of a step that was traced.

TRACE = "trace"  # the phase of a trial in which its steps are traced
STEP_PARTS = (
    *("compute", "gathering", "reducing", "exchanging", "update", "host_update", "transfers", "disk", "data"),
    *("launches", "other"),
)
"""The parts of a step. A plan names its parts alike; `other` is known only to a trace.

`compute`: forward and backward passes. `gathering`: waiting for parameters. `reducing`: waiting for sums of gradients.
`exchanging`: waiting for activations of other ranks. `update`: the optimizer on the device. `host_update`: the
optimizer on the host. `transfers`: waiting for copies between host and device. `disk`: waiting for NVMe drives. `data`:
waiting for a batch of a data loader. `launches`: the device waits for the host to issue work. `other`: the program does
something else.
"""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """An optimizer step that was traced, as the mean over ranks and steps."""

    seconds: float = 0.0  # of the step, with the profiler's own cost
    # Seconds by the names of `STEP_PARTS`. They add up to `seconds`.
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0  # how many were traced. 0 if none could be.
    spent: float = 0.0  # seconds that the tracing took, its steps included
    failure: str = ""  # why nothing was traced, in a sentence. Empty if it was.

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of the step, in the order of `STEP_PARTS`; empty without a trace."""
        if self.seconds <= 0:
            return {}
        return {part: self.parts[part] / self.seconds for part in STEP_PARTS if self.parts.get(part)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
