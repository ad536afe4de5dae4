"""Predicts whether the next micro-batch size of a sweep fits, from the memory of the sizes so far. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SizeMemory:
    """The memory of one size, on the rank that has used most.

    Attributes:
        samples: its micro-batch size.
        above_initialize: bytes of its peak above the bytes in use after `deepspeed.initialize`.
        available: bytes that the slot still had then, on the rank with the least; None without a limit.
    """

    samples: int
    above_initialize: int
    available: int | None


def foreseen(measured: Sequence[SizeMemory], samples: int, bytes_per_sample: float) -> float:
    """Returns the predicted bytes of a size above initialisation.

    The last two sizes give a straight line. One size gives a line with the estimated slope. The peak of the optimizer's
    step can hide the activations of small sizes, so the line may be too flat. The activations alone are therefore a
    lower bound. They count as the estimate for each sample, or as the most that a sample can have had in any measured
    size.

    Args:
        measured: the sizes so far, ascending; one at least.
        samples: the next micro-batch size.
        bytes_per_sample: estimated memory of one more sample.
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
    """Returns whether a size is predicted to fit, with a share of the memory free.

    Args:
        measured: the sizes so far, ascending; one at least.
        samples: the next micro-batch size.
        bytes_per_sample: estimated memory of one more sample.
        headroom: the share that has to stay free, of the memory that was available after initialisation.
    """
    bounds = [size.available for size in measured if size.available is not None]
    if not bounds:
        return True
    return foreseen(measured, samples, bytes_per_sample) <= min(bounds) * (1 - headroom)
