"""What a program's last run leaves in the process, where the program is run again."""

import sys
import weakref
from typing import Any

from trial_lib.device.rank.base import Device

# What a program may keep of its last run beyond an engine that has not trained: caches and modules. An engine with its
# optimizer's states is more, where it matters.
_MOST_KEPT_BYTES, _MOST_KEPT_SHARE = 64 * 2**20, 0.05


class EndedRun:
    """An engine whose program has come to its end.

    Args:
        engine: of that run; it is destroyed, and nothing here holds on to it.
    """

    def __init__(self, engine: Any) -> None:
        self._parts = [weakref.ref(part) for part in (engine, engine.optimizer, engine.module) if part is not None]
        engine.destroy()
        _forget_models()

    def is_held(self, device: Device, used_at_first: int, available: int | None) -> bool:
        """Returns whether the program still holds the engine; to be asked when garbage has been collected.

        Args:
            device: that it has trained on.
            used_at_first: bytes in use when the first run's engine was there.
            available: bytes that a run has for its steps; None where nothing bounds them.
        """
        most = _MOST_KEPT_BYTES if available is None else max(_MOST_KEPT_BYTES, _MOST_KEPT_SHARE * available)
        if device.used_bytes() > used_at_first + most:
            return True
        # A device that has memory of its own does not show what is held on the host: states that are offloaded.
        return device.is_apart and any(part() is not None for part in self._parts)


def _forget_models() -> None:
    """Empties what DeepSpeed's ZeRO 3 keeps each engine's model in, and so the engine: a list, and a method's cache."""
    offload = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    getattr(offload, "FWD_MODULE_STACK", []).clear()
    coordinator = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    for method in vars(getattr(coordinator, "PartitionedParameterCoordinator", object)).values():
        # The cache is below another decorator, which leaves no trace of it but its closure.
        for cell in getattr(method, "__closure__", None) or ():
            getattr(cell.cell_contents, "cache_clear", lambda: None)()
