"""How the samples that a trial asks for show in the batches that arrive. A rank imports it: standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Arrival:
    """What the program as it was typed has shown of its batches.

    Attributes:
        rows_per_sample: rows that one sample takes (two in a preference trainer); 0 where rows do not show samples,
            because a row holds several of them (sequences that are packed without padding).
        varies: whether the number of samples differs from micro-batch to micro-batch: each row is a sample then.
        typed_micro_batch: the micro-batch size of the program as typed.
        typed_tokens: tokens in its first micro-batch; None where the batches show none.
        dimension: which dimension of a batch's first tensor has the rows: 0, or 1 for `(sequence, batch, ...)`.
        other_rows_per_sample: what `rows_per_sample` is if the other one of these two has them; 0 where it has not. A
            tensor of one program in one size may be read both ways; the one that follows another size tells.
        typed_accumulation: what the engine of the program as typed was set to.
        typed_micro_batches: that the program as typed fed it in its first optimizer step; None where unknown.
    """

    rows_per_sample: int = 1
    varies: bool = False
    typed_micro_batch: int = 1
    typed_tokens: int | None = None
    dimension: int = 0
    other_rows_per_sample: int = 1
    typed_accumulation: int = 1
    typed_micro_batches: int | None = None

    @classmethod
    def of_typed(cls, micro_batch: int, sizes: Sequence[int], tokens: int | None) -> "Arrival":
        """Returns what the first micro-batch of the program as typed says.

        Args:
            micro_batch: the micro-batch size of its engine.
            sizes: of its first tensor, in the one dimension, or the two, that may have the rows.
            tokens: in it, where it shows any.
        """
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
        """Returns what the first micro-batch of a trial says: where the other dimension alone follows, it has the rows.

        Args:
            asked: the micro-batch size.
            sizes: of its first tensor, as in `of_typed`.
            tokens: in it, where it shows any.
        """
        if self.varies or not self.other_rows_per_sample or len(sizes) < 2:
            return self
        readings = (self, self._turned())
        found = [each for each in readings if each.follows(asked, sizes[each.dimension], tokens)]
        return replace(found[0], other_rows_per_sample=0) if found else self

    def _turned(self) -> "Arrival":
        """Returns the other reading."""
        return replace(
            self,
            dimension=1 - self.dimension,
            rows_per_sample=self.other_rows_per_sample,
            other_rows_per_sample=self.rows_per_sample,
        )

    def rows(self, asked: int) -> int:
        """Returns the rows of a micro-batch of a size."""
        return asked * max(1, self.rows_per_sample)

    def samples(self, rows: float, asked: float) -> float:
        """Returns the samples in micro-batches that were asked to have so many together."""
        if self.varies:
            return rows
        return rows / self.rows_per_sample if self.rows_per_sample else asked

    def follows(self, asked: int, rows: int, tokens: int | None) -> bool:
        """Returns whether a micro-batch is of the size that was asked for, as far as it can be told.

        Args:
            asked: the size.
            rows: that arrived.
            tokens: in them, where they show any.
        """
        if self.varies:
            return True
        if self.rows_per_sample:
            return rows == self.rows(asked)
        if tokens is None or not self.typed_tokens:
            return True
        # Lengths differ from sample to sample.
        return _follows(tokens, self.typed_tokens, asked / self.typed_micro_batch)

    def accumulates(self, asked: int, micro_batches: int) -> bool:
        """Returns whether an optimizer step has followed an accumulation, as far as it can be told.

        Args:
            asked: the accumulation.
            micro_batches: that were fed in the step; 0 where none are seen.
        """
        if not self.typed_micro_batches or not micro_batches:
            return True
        # At the end of its data a program may step early.
        return _follows(micro_batches, self.typed_micro_batches, asked / self.typed_accumulation)


def _follows(found: int, typed: int, growth: float) -> bool:
    """Returns whether a number has grown as what was asked for: nearer to that than to what was typed, as ratios."""
    if growth == 1:
        return True
    expected = typed * growth
    apart = max(found / expected, expected / found)
    return apart < max(found / typed, typed / found) or apart < 2**0.5
