"""Where trials run: one interface for this host, for hosts that one trial spans, and for the hosts of a cluster."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trial_lib.device.host.base import Host
from trial_lib.launch.rank_starter import RankStarter
from trial_lib.launch.sweep import run_sweep
from trial_lib.launch.trial import TrialPlan, run_trial
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.result import TrialResult

Note = Callable[[str], None]
"""Is told what holds trials up, for people."""

OnResult = Callable[[int, TrialResult], None]
"""Is told each result of a sweep, with the position of its plan."""


class Place(Protocol):
    """Runs trials, several at once, each called from a thread of its own."""

    @property
    def can_sweep(self) -> bool:
        """Whether one process group may measure several micro-batch sizes there."""

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """Runs one trial and returns its result, which is also in the trial's folder."""

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """Measures the sizes of a sweep in one process group; returns for each its result, or why there is none."""

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has DeepSpeed's ops built that trials are going to need, and waits; returns why some cannot be.

        Where that is not known, as on a cluster whose hosts come and go, nothing is returned.
        """

    def prime(self, modules: list[str]) -> None:
        """Is told what the profile trial had imported, so that later trials need not import it again."""

    def close(self) -> None:
        """Ends everything that runs there."""


class ThisHost:
    """The slots of this host.

    Args:
        starter: starts the processes; where it reaches other hosts, the slots are theirs, too.
        host: the slots.
        lock_dir: the locks of slots and ports on this host.
    """

    def __init__(self, starter: RankStarter, host: Host, lock_dir: Path) -> None:
        self._starter = starter
        self._host = host
        self._lock_dir = lock_dir
        self.can_sweep = True

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """See `Place.run_trial`."""
        return run_trial(plan, self._starter, self._host, self._lock_dir, cancelled, note)

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """See `Place.run_sweep`."""
        return run_sweep(plans, sweep, self._starter, self._host, self._lock_dir, cancelled, note, measured)

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """See `Place.build`."""
        return self._starter.build(builders)

    def prime(self, modules: list[str]) -> None:
        """See `Place.prime`."""
        self._starter.prime(modules)

    def close(self) -> None:
        """See `Place.close`."""
        self._starter.close()
