"""Moments that several processes compare. A wall clock that is set does not move those of one host.

A rank imports this module, so it needs only the standard library.
"""

import functools
import time
from collections.abc import Sequence
from pathlib import Path

HostMoment = Sequence[str | float]
"""The boot of a host, seconds since then, and seconds since the epoch, which other hosts have as well."""


def now() -> HostMoment:
    """Returns the present, as JSON can hold it."""
    return [_boot(), since_boot(), time.time()]


def seconds_since(moment: HostMoment) -> float:
    """Returns the seconds since a moment of this host or, by the wall clocks, of another one."""
    boot, steady, wall = moment
    passed = since_boot() - float(steady) if boot == _boot() else time.time() - float(wall)
    return max(0.0, passed)


def since_boot() -> float:
    """Returns the seconds since this host's boot, which all its processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
