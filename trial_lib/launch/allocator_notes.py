"""Sentences for the user about CUDA's caching allocator in a trial. Pure functions."""

from collections.abc import Mapping

from trial_lib.records.result import Memory
from trial_lib.records.units import bytes_shown

# A note appears if idle fragments take more than this share of the device.
_LARGE = 0.1
# The name of the setting since torch 2.9, and the older name.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def allocator_note(memory: Memory, environment: Mapping[str, str]) -> str:
    """Returns a sentence on a trial's memory beyond its peak. Mostly there is nothing to say, and on a CPU never.

    Args:
        memory: the memory of its ranks.
        environment: the environment variables of its ranks.
    """
    return " ".join(filter(None, (_retries(memory), _idle(memory, environment))))


def _retries(memory: Memory) -> str:
    if not memory.was_short:
        return ""
    return (
        f"CUDA's allocator had to empty its cache {max(memory.counted_retries)} times in the measured steps, which "
        "costs time: memory was short, and a longer training may run out of it."
    )


def _idle(memory: Memory, environment: Mapping[str, str]) -> str:
    ranks = zip(memory.peak_reserved, memory.steps_peak, memory.least_free, strict=False)
    idle, share = max(
        ((reserved - peak, (reserved - peak) / (reserved + free)) for reserved, peak, free in ranks if reserved),
        default=(0, 0.0),
    )
    if share < _LARGE or any(_EXPANDABLE in environment.get(name, "") for name in _SETTINGS):
        return ""
    return (
        f"{bytes_shown(idle)} of the device ({share:.0%}) were reserved and held no tensor at the peak: "
        f"PYTORCH_CUDA_ALLOC_CONF={_EXPANDABLE} may make them usable."
    )
