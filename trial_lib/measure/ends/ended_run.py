"""The remains of a program's last run in the process, before the program is run again."""

import sys
import weakref
from typing import Any

from trial_lib.device.rank.base import Device

# A program may keep caches and modules of its last run, beyond an engine that has not trained. An engine with its
# optimizer's states is larger, if it matters.
_MOST_KEPT_BYTES, _MOST_KEPT_SHARE = 64 * 2**20, 0.05


class EndedRun:
    """An engine whose program has ended.

    Args:
        engine: of that run. It is destroyed, and this object keeps no reference to it.
    """

    def __init__(self, engine: Any) -> None:
        self._parts = [weakref.ref(part) for part in (engine, engine.optimizer, engine.module) if part is not None]
        engine.destroy()
        _forget_models()

    def is_held(self, device: Device, used_at_first: int, available: int | None, has_compiled: bool = False) -> bool:
        """Returns whether the program still holds the engine. Call it after a garbage collection.

        Args:
            device: that it has trained on.
            used_at_first: bytes in use when the first run's engine had been built.
            available: bytes that a run has for its steps; None without a limit.
            has_compiled: whether this process has compiled something.
        """
        if has_compiled and not device.is_apart:
            # The compiler's own modules and caches stay in the process, and take more memory than a small engine.
            return any(part() is not None for part in self._parts)
        most = _MOST_KEPT_BYTES if available is None else max(_MOST_KEPT_BYTES, _MOST_KEPT_SHARE * available)
        if device.used_bytes() > used_at_first + most:
            return True
        # A device with memory of its own does not show states that are offloaded to the host.
        return device.is_apart and any(part() is not None for part in self._parts)


def _forget_models() -> None:
    """Empties a list and a method's cache in which DeepSpeed's ZeRO 3 keeps each engine's model, and so the engine."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    getattr(offload, "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        # The cache is below another decorator. Only the decorator's closure has a reference to it.
        for cell in getattr(method, "__closure__", None) or ():
            getattr(cell.cell_contents, "cache_clear", lambda: None)()
