"""The clocks of a step: the host issues, the device computes, links carry. Pure.

An operation begins when its clock is free and what it needs is there. The device's idle time is counted by what it
waited for. So the parts of a step add up to its seconds.
"""

from collections import deque
from dataclasses import dataclass, field

from trial_lib.wire.traced_step import STEP_PARTS

PARTS = ("compute", "launches", *(part for part in STEP_PARTS if part not in ("compute", "launches", "other")))
"""The parts of a step. Beside `compute` and `update` they are waiting times of the device.

`launches`: for the host to issue the next operation. `gathering`: for parameters. `reducing`: for gradients.
`exchanging`: for activations of tensor, sequence or pipeline parallelism. `host_update`: for the optimizer on the host.
`transfers`: for copies between device and host. `disk`: for states on NVMe. `data`: for the loader.
"""

# DeepSpeed fills a second bucket while the first is reduced, and no third (stage_1_and_2.py, stage3.py in 0.19.8).
_BUCKETS = 2
# The host waits for the fetch before the last two (partitioned_param_coordinator.py).
_FETCHES = 2


@dataclass
class Timeline:
    """The clocks, in seconds since the step began.

    Attributes:
        host: when the host can issue the next operation.
        device: when the device has done all that was issued.
        links: when the links between devices have.
        to_host: when copies to the host have.
        to_device: when copies to the device have.
        disk: when a disk has read and written, by the kind of operation.
        parts: seconds so far, by the names of `PARTS`.
    """

    host: float = 0.0
    device: float = 0.0
    links: float = 0.0
    to_host: float = 0.0
    to_device: float = 0.0
    disk: dict[str, float] = field(default_factory=lambda: {"from_disk": 0.0, "to_disk": 0.0})
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _pauses: deque[tuple[float, float, str]] = field(default_factory=deque)
    _gathers: deque[tuple[float, float]] = field(default_factory=deque)
    _fetches: deque[float] = field(default_factory=deque)
    _ahead: float = 0.0
    _reductions: deque[float] = field(default_factory=deque)

    def pause(self, seconds: float, part: str) -> None:
        """Keeps the host from issuing."""
        if seconds > 0:
            self._pauses.append((self.host, self.host + seconds, part))
            self.host += seconds

    def compute(self, seconds: float, launch: float, part: str) -> None:
        """Runs an operation on the device."""
        self.host += launch
        if self.host > self.device:
            self._device_waits_for_the_host()
        self.device += seconds
        self.parts[part] += seconds

    def wait(self, until: float, part: str) -> None:
        """Lets the device wait."""
        if until > self.device:
            self._device_waits_for_the_host(until)
            self.parts[part] += max(0.0, until - self.device)
            self.device = max(self.device, until)

    def catch_up(self) -> None:
        """Lets the host wait for the device, as code does that asks for a value."""
        self.host = max(self.host, self.device)

    def carry(self, seconds: float, launch: float, after_device: bool) -> float:
        """Sends over the links, and returns when that ends.

        Args:
            seconds: of the transfer.
            launch: seconds in which the host issues it.
            after_device: whether it sends what the device computes.
        """
        self.host += launch
        begin = max(self.links, self.host, self.to_device, self.device if after_device else 0.0)
        self.links = begin + seconds
        return self.links

    def swap(self, kind: str, seconds: float) -> None:
        """Lets a disk read or write. A drive does both at once."""
        begin = max(self.host, self.to_host) if kind == "to_disk" else self.host
        self.disk[kind] = max(self.disk[kind], begin) + seconds

    def swapped(self, kind: str) -> None:
        """Lets the host wait for what a disk reads, or writes."""
        self.pause(self.disk[kind] - self.host, "disk")

    def gather_ahead(self, end: float, size: float, allowed: float) -> None:
        """Notes parameters that are on their way.

        The order of gathers tells which of them the device needs next. The latest `allowed` bytes are for later.
        """
        self._gathers.append((end, size))
        self._ahead += size
        self._fetches.append(end)
        if len(self._fetches) > _FETCHES:
            self.pause(self._fetches.popleft() - self.host, "gathering")
        while self._gathers and self._ahead - self._gathers[0][1] >= allowed:
            self._wait_for_first_gather()

    def all_gathered(self) -> None:
        """Lets the device wait for all parameters that are on their way."""
        while self._gathers:
            self._wait_for_first_gather()

    def reduce_behind(self, end: float) -> None:
        """Notes a bucket that is being reduced. The device waits if there is no bucket left to fill."""
        self._reductions.append(end)
        if len(self._reductions) > _BUCKETS - 1:
            self.wait(self._reductions.popleft(), "reducing")

    def all_reduced(self) -> None:
        """Lets the device wait for all buckets."""
        self._reductions.clear()
        self.wait(self.links, "reducing")

    def finish(self, part: str) -> float:
        """Returns the seconds of the step. The device waits for all links, under the name of `part`."""
        self.all_gathered()
        self.wait(self.links, part)
        self.wait(max(self.to_host, self.to_device), "transfers")
        for kind in self.disk:
            self.swapped(kind)
        self._device_waits_for_the_host()
        return self.device

    def _wait_for_first_gather(self) -> None:
        end, size = self._gathers.popleft()
        self._ahead -= size
        self.wait(end, "gathering")

    def _device_waits_for_the_host(self, until: float | None = None) -> None:
        end = self.host if until is None else min(self.host, until)
        while self._pauses and self._pauses[0][1] <= self.device:
            self._pauses.popleft()
        if end <= self.device:
            return
        idle = end - self.device
        for begin, stop, part in self._pauses:
            within = min(stop, end) - max(begin, self.device)
            if within > 0:
                self.parts[part] += within
                idle -= within
        self.parts["launches"] += idle
        self.device = end
