"""The memory of a rank: what its engine has taken, what is left for the steps, the most that was in use."""

from trial_lib.device.rank.base import Device
from trial_lib.device.rank.here import device_to_come


class RankMemory:
    """Follows the memory of a rank whose engine is measured.

    Attributes:
        after_initialize: bytes in use when the engine was there.
    """

    def __init__(self) -> None:
        self.after_initialize = 0
        self._budget: int | None = None
        self._available: int | None = None
        self._initialize_peak = self._peak = 0
        self._retries_before = 0
        self._final: dict[str, int] | None = None

    def begin(self, budget: int | None) -> None:
        """Holds the process to so many bytes from here on, if there is a limit.

        Raises:
            UnknownDeviceError: see `device_of`.
        """
        device = device_to_come()
        self._budget = None if budget is None else device.limit(budget)

    def engine_built(self, device: Device) -> None:
        """Notes what the engine has taken, and what it has left."""
        self._initialize_peak = self._peak = device.peak_bytes()
        self._available = device.available_bytes()
        self.after_initialize = device.used_bytes()
        device.forget_peak()
        self._retries_before = _retries(device)
        if self._budget is not None:
            device.keep_what_is_freed()

    def taken_over(self) -> "RankMemory":
        """Returns the memory of the same engine before it was measured: it counts from there, as in fresh ranks."""
        memory = RankMemory()
        memory.after_initialize, memory._budget = self.after_initialize, self._budget
        memory._available, memory._initialize_peak = self._available, self._initialize_peak
        memory._peak = self._initialize_peak
        return memory

    def step_ended(self, device: Device, counts: bool) -> None:
        """Notes the most that was in use by now.

        Not at the end alone: what a CPU's process will have read of files by then is no part of this step's peak.

        Args:
            device: of the engine.
            counts: whether the step is one of those that are counted, and not of the warm-up.
        """
        if not counts:
            self._retries_before = _retries(device)
        self._peak = max(self._peak, device.peak_bytes())

    def slot_bytes(self, device: Device) -> int:
        """Returns what the slot has for this process."""
        return device.total_bytes() if self._budget is None else self._budget

    def end(self, device: Device) -> None:
        """Leaves out what comes from here on: it is none of the training's."""
        self._final = self.figures(device)

    def figures(self, device: Device) -> dict[str, int]:
        """Returns them by the names of `trial_lib.records.result.Memory`."""
        return self._final or {
            "peak": max(device.peak_bytes(), self._peak),
            "after_initialize": self.after_initialize,
            **({} if self._available is None else {"available": self._available}),
            **device.allocator_figures(),
            **(self._of_allocator(device) if device.allocator_figures() else {}),
        }

    def _of_allocator(self, device: Device) -> dict[str, int]:
        """Returns what an allocator that holds memory back adds to the figures."""
        left, figures = device.left_bytes(), device.allocator_figures()
        may_have = min(left["free"] + left["reserved"], device.total_bytes())
        return {
            "steps_peak": device.peak_bytes(),
            "counted_retries": figures["allocator_retries"] - self._retries_before,
            "least_free": max(0, may_have - figures["peak_reserved"]),
        }


def _retries(device: Device) -> int:
    return device.allocator_figures().get("allocator_retries", 0)
