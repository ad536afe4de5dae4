"""Lengths of a training in batches, records and epochs, and the times of periodic events.

A batch is an optimizer step. An epoch is a pass over the training loader, `micro_batches_per_epoch` long on each
replica. If that is no multiple of the accumulation, an epoch ends within the batch that takes its last micro-batch.
"""

from dataclasses import dataclass

from trial_lib.messages.orders import UnitLength
from trial_lib.training.distributed import InvalidTrialError


@dataclass(frozen=True)
class Pace:
    """The relation of batches, records and epochs in one training."""

    train_batch_size: int  # samples of a batch, over all replicas
    accumulation: int  # micro-batches of a batch, on each replica
    micro_batches_per_epoch: int | None = None  # on each replica; None if the loader does not know
    records_per_epoch: int | None = None  # samples of an epoch, for a loader that does not know; None if unknown

    @property
    def _epochs_per_batch(self) -> tuple[int, int]:
        # The share of an epoch in a batch, as numerator and denominator; zero if unknown.
        if self.micro_batches_per_epoch is not None:
            return self.accumulation, self.micro_batches_per_epoch
        if self.records_per_epoch is not None:
            return self.train_batch_size, self.records_per_epoch
        return 0, 1

    @property
    def inexact_epochs(self) -> str | None:
        """Why epochs do not begin with a batch; None if they do, or if it is unknown."""
        part, whole = self._epochs_per_batch
        if not part or whole % part == 0:
            return None
        what = "micro-batches on each replica" if self.micro_batches_per_epoch is not None else "records"
        return (
            f"an epoch has {whole} {what}, which is no multiple of the {part} of a batch: epochs end within a batch, "
            "and the next one begins in the same"
        )

    def done(self, batches: int, unit: str) -> int:
        """How many of a unit (`batches`, `records` or `epochs`) are complete after so many batches.

        Raises:
            InvalidTrialError: epochs are asked for, and their length is not known.
        """
        if unit == "batches":
            return batches
        if unit == "records":
            return batches * self.train_batch_size
        part, whole = self._epochs_per_batch
        if not part:
            raise InvalidTrialError(
                "The experiment counts in epochs, and the training loader does not tell how long one is (it has no "
                "len()). Set records_per_epoch in the YAML, or count in batches or records."
            )
        return batches * part // whole

    def batches_for(self, length: UnitLength) -> int:
        """The first number of batches that reaches a length."""
        unit, count = _only(length)
        self.done(0, unit)
        part, whole = {"batches": (1, 1), "records": (self.train_batch_size, 1)}.get(unit, self._epochs_per_batch)
        return -(-count * whole // part)

    def is_due(self, period: UnitLength | None, batches: int) -> bool:
        """Whether the last batch has completed a period; never for None or 0."""
        if period is None:
            return False
        unit, count = _only(period)
        return count > 0 and self.done(batches, unit) // count > self.done(batches - 1, unit) // count

    def epoch_of(self, batch_idx: int) -> int:
        """The epoch, from 0, that a batch begins in; 0 if unknown."""
        part, whole = self._epochs_per_batch
        return batch_idx * part // whole

    def is_epoch_start(self, batch_idx: int) -> bool:
        """Whether a batch is the first that begins in its epoch."""
        return batch_idx == 0 or self.epoch_of(batch_idx) != self.epoch_of(batch_idx - 1)

    def is_epoch_end(self, batch_idx: int) -> bool:
        """Whether a batch takes the last micro-batch of its epoch."""
        return self.epoch_of(batch_idx + 1) != self.epoch_of(batch_idx)


def _only(length: UnitLength) -> tuple[str, int]:
    ((unit, count),) = length.items()
    return unit, count
