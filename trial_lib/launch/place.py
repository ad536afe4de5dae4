"""The places where trials run: this host, the hosts that one trial spans, or the hosts of a cluster."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.rank_starter import RankStarter
from zerotune.trial_lib.launch.trial import TrialPlan, run_sweep, run_trial
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.records.candidate import Sweep, Withdrawal
from zerotune.trial_lib.records.result import TrialResult

Note = Callable[[str], None]
"""Called with a sentence for the user when something delays trials."""

OnResult = Callable[[int, TrialResult], None]
"""Called with each result of a sweep and the position of its plan."""


class Place(Protocol):
    """Runs trials. Several threads may call it at once, each with one trial."""

    @property
    def can_sweep(self) -> bool: ...

    @property
    def starter_here(self) -> RankStarter | None:
        """Starts processes on this host alone; None if trials span several hosts."""

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """Runs one trial and returns its result. The trial's folder has it too."""

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """Returns a result for each size, or the reason why there is none."""

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has the ops built that trials will need, and waits. Returns the reason for each op that cannot be built.

        A cluster, whose hosts come and go, returns nothing.
        """

    @property
    def has_compiled(self) -> bool:
        """Whether it has compiled ops beside trials, whose times do not count then."""

    def prime(self, imported: Sequence[Import]) -> None:
        """Imports the modules of the profile trial ahead, so that later trials start faster."""

    def close(self) -> None: ...


class ThisHost:
    """The slots of this host. If the starter reaches other hosts, `host` has their slots too."""

    def __init__(self, starter: RankStarter, host: Host, lock_dir: Path, is_one: bool = True) -> None:
        self._starter = starter
        self._host = host
        self._lock_dir = lock_dir
        self.can_sweep = True
        self.starter_here = starter if is_one else None

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        return run_trial(plan, self._starter, self._host, self._lock_dir, cancelled, note)

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        return run_sweep(plans, sweep, self._starter, self._host, self._lock_dir, cancelled, note, measured)

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        return self._starter.build(builders)

    @property
    def has_compiled(self) -> bool:
        return self._starter.has_compiled

    def prime(self, imported: Sequence[Import]) -> None:
        self._starter.prime(imported)

    def close(self) -> None:
        self._starter.close()
