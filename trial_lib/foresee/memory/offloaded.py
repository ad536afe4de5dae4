"""Host memory of a rank, from a foreseen run: offloaded states in pageable and in pinned memory, and its data.

`trial_lib/memory/host_bytes.py` has formulas for the same without a run.
"""

from collections import Counter
from dataclasses import dataclass

from trial_lib.foresee.memory.live_bytes import live_bytes
from trial_lib.foresee.memory.rounding import rounded
from trial_lib.wire.foreseen_run import PLACES, ForeseenRun


@dataclass(frozen=True, kw_only=True)
class HostPeak:
    """Bytes of one rank in its host's memory.

    Attributes:
        pageable: the most live bytes in pageable memory during the steps.
        built: the most while the program builds its model, which may be on the host.
        pinned: the most live bytes in pinned memory, each block a power of two.
        pinned_blocks: all blocks that torch has pinned. It keeps a freed one for the next request of its size.
        data: of the program's data, which are real.
    """

    pageable: float
    built: float
    pinned: float
    pinned_blocks: float
    data: float

    @property
    def held(self) -> float:
        """All that stays in the host for the rank's steps, beside the interpreter and its libraries."""
        return self.pageable + self.pinned_blocks + self.data


def host_peak(run: ForeseenRun) -> HostPeak:
    """Returns the host memory of a run's rank."""
    highest = live_bytes(run, "host").by_name()
    return HostPeak(
        pageable=max((peak for name, peak in highest.items() if name != "initialize"), default=0.0),
        built=highest.get("initialize", 0.0),
        pinned=live_bytes(run, "pinned").peak,
        pinned_blocks=_pinned_blocks(run),
        data=run.data_bytes,
    )


def _pinned_blocks(run: ForeseenRun) -> float:
    """Returns the bytes of all pinned blocks, by size the most that are live at once.

    Source: `aten/src/ATen/core/CachingHostAllocator.h` of PyTorch 2.13, which keeps free blocks in one list for each
    power of two and gives none back.
    """
    index = PLACES.index("pinned")
    live: Counter[float] = Counter()
    most: Counter[float] = Counter()
    for storage, is_made in run.events:
        if run.storages[storage].place != index:
            continue
        size = rounded(run.storages[storage].size, "pinned")
        live[size] += 1 if is_made else -1
        most[size] = max(most[size], live[size])
    return sum(size * count for size, count in most.items())
