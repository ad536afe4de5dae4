"""How the samples that a trial asks for show in the batches that arrive. A rank imports it: standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """What the program as it was typed has shown of its batches.

    Attributes:
        rows_per_sample: rows that one sample takes (two in a preference trainer); 0 where rows do not show samples,
            because a row holds several of them (sequences that are packed without padding).
        varies: whether the number of samples differs from micro-batch to micro-batch: each row is a sample then.
        typed_micro_batch: the micro-batch size of the program as typed.
        typed_tokens: tokens in its first micro-batch; None where the batches show none.
    """

    rows_per_sample: int = 1
    varies: bool = False
    typed_micro_batch: int = 1
    typed_tokens: int | None = None

    @classmethod
    def of_typed(cls, micro_batch: int, rows: int, tokens: int | None) -> "Arrival":
        """Returns what the first micro-batch of the program as typed says.

        Args:
            micro_batch: the micro-batch size of its engine.
            rows: that arrived.
            tokens: in them, where they show any.
        """
        rows_per_sample = rows // micro_batch if rows % micro_batch == 0 else 1
        if rows == 1 < micro_batch and tokens is not None:
            rows_per_sample = 0
        return cls(rows_per_sample, typed_micro_batch=micro_batch, typed_tokens=tokens)

    def rows(self, asked: int) -> int:
        """Returns the rows of a micro-batch of a size."""
        return asked * max(1, self.rows_per_sample)

    def samples(self, rows: int, asked: int) -> float:
        """Returns the samples in a micro-batch that was asked to be of a size."""
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
        if tokens is None or not self.typed_tokens or asked == self.typed_micro_batch:
            return True
        # Lengths differ from sample to sample: nearer to what was asked for than to what was typed, as ratios.
        expected = self.typed_tokens * asked / self.typed_micro_batch
        apart = max(tokens / expected, expected / tokens)
        return apart < max(tokens / self.typed_tokens, self.typed_tokens / tokens) or apart < 2**0.5
