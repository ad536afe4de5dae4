"""What CUDA's caching allocator had to do in a trial, in sentences for people. Pure."""

from collections.abc import Mapping

from trial_lib.records.result import Memory
from trial_lib.records.units import bytes_shown

# Share of the device that lies idle in pieces before it is worth a word.
_LARGE = 0.1
# torch's name of the setting since 2.9, and the older one.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def allocator_note(memory: Memory, environment: Mapping[str, str]) -> str:
    """Returns what a person should know of a trial's memory beside its peak; empty on a CPU, and mostly.

    Args:
        memory: of its ranks.
        environment: that they started with.
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
