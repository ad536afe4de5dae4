"""Whether the next micro-batch size of a sweep will fit, from what the sizes so far have taken. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SizeMemory:
    """What one size has taken, on the rank that has taken most.

    Attributes:
        samples: its micro-batch size.
        above_initialize: bytes of its peak above what was in use after `deepspeed.initialize`.
        available: bytes that the slot still had then, on the rank that had least; None where nothing bounds them.
    """

    samples: int
    above_initialize: int
    available: int | None


def foreseen(measured: Sequence[SizeMemory], samples: int, bytes_per_sample: float) -> float:
    """Returns the bytes above initialisation that a size will take.

    Those of the last two sizes on a straight line; from one size, a line with the estimated slope. The peak of the
    optimizer's step hides what small sizes keep for the backward pass, so the line may come out too flat: the
    activations alone bound it from below, at the estimate a sample, or at what a sample can have had at most in any
    size that was measured.

    Args:
        measured: the sizes so far, ascending; one at least.
        samples: the next micro-batch size.
        bytes_per_sample: estimate of what one more sample takes.
    """
    last = measured[-1]
    slope = bytes_per_sample
    if len(measured) > 1:
        before = measured[-2]
        slope = max(0.0, (last.above_initialize - before.above_initialize) / (last.samples - before.samples))
    on_the_line = last.above_initialize + slope * (samples - last.samples)
    most_a_sample = min(size.above_initialize / size.samples for size in measured)
    return max(on_the_line, min(bytes_per_sample, most_a_sample) * samples)


def will_fit(measured: Sequence[SizeMemory], samples: int, bytes_per_sample: float, headroom: float) -> bool:
    """Returns whether a size is foreseen to fit, with a share of the memory left free.

    Args:
        measured: the sizes so far, ascending; one at least.
        samples: the next micro-batch size.
        bytes_per_sample: estimate of what one more sample takes.
        headroom: the share that is to stay free, of the memory that was available after initialisation.
    """
    bounds = [size.available for size in measured if size.available is not None]
    if not bounds:
        return True
    return foreseen(measured, samples, bytes_per_sample) <= min(bounds) * (1 - headroom)
