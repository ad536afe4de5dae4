"""Runs trials on the hosts of a Ray cluster. The study's folder stays on the driver's host."""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trial_lib.launch.place import Note, OnResult
from trial_lib.launch.rank_starter import RankStarter
from trial_lib.launch.ray.cluster import RayCluster
from trial_lib.launch.ray.order import ClusterOrder, ClusterShare, Delivery
from trial_lib.launch.ray.transfer import unpack
from trial_lib.launch.trial import TrialPlan, clear, take_result, unstarted, write_candidate, write_unstarted
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.wire.imported import Import
from trial_lib.wire.whole_files import write_whole

_POLL_S = 0.5
# The time from a cancellation to the end of the ranks on all hosts.
_PATIENCE_S = 10.0


class HostLostError(Exception):
    """A host of an order is gone, or Ray's processes there are."""


class Sent(Protocol):
    """An order that was sent to the cluster."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for the order's end. Returns whether it has ended."""

    def delivery(self) -> Delivery:
        """Returns the answer.

        Raises:
            HostLostError: there will be none.
        """

    def abandon(self) -> None:
        """Withdraws the order if it still waits for slots."""


class RayPlace:
    """Runs trials on a cluster.

    Args:
        study_id: the study's id.
        cluster: the study's actors.
        share: the part of the cluster that each trial takes.

    Attributes:
        send: sends an order to the cluster.
        can_sweep: whether all ranks of a trial are on one host. The driver steers a sweep by files on that host.
    """

    send: Callable[[ClusterOrder], Sent]

    def __init__(self, study_id: str, cluster: RayCluster, share: ClusterShare) -> None:
        self._study_id = study_id
        self._cluster = cluster
        self._share = share
        self.can_sweep = share.hosts == 1
        self.starter_here: RankStarter | None = None
        self._lock = threading.Lock()

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """See `Place.run_trial`."""
        started_at, began = time.time(), time.monotonic()
        write_candidate(plan)
        clear(plan)
        delivery = self._carried_out(ClusterOrder(self._study_id, (plan,), self._share), cancelled, note)
        if isinstance(delivery, TrialResult):
            write_unstarted(plan, delivery)
            return delivery
        unpack(delivery.files[0], plan.paths.root)
        if delivery.ending is not None:
            device = "cuda" if self._share.resource == "GPU" else "cpu"
            seconds = time.monotonic() - began
            return take_result(plan, delivery.ending, delivery.kernel_killed, device, started_at, seconds)
        (result,) = delivery.ends
        assert isinstance(result, TrialResult)
        _write(plan.paths.result, result)
        return result

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """See `Place.run_sweep`. All results arrive together, when the last size has ended."""
        for plan in plans:
            write_candidate(plan)
            clear(plan)
        order = ClusterOrder(self._study_id, tuple(plans), self._share, sweep)
        delivery = self._carried_out(order, cancelled, note)
        ends: list[TrialResult | Withdrawal]
        if isinstance(delivery, TrialResult):
            ends = [delivery, *[Withdrawal.ENDED] * (len(plans) - 1)]
        else:
            ends = delivery.ends
            for plan, files in zip(plans, delivery.files, strict=True):
                unpack(files, plan.paths.root)
        for position, (plan, end) in enumerate(zip(plans, ends, strict=True)):
            if isinstance(end, TrialResult):
                _write(plan.paths.result, end)
                measured(position, end)
            else:
                shutil.rmtree(plan.paths.root, ignore_errors=True)
        return ends

    def _carried_out(self, order: ClusterOrder, cancelled: threading.Event, note: Note) -> Delivery | TrialResult:
        """Returns the answer to an order. If there is none, the result of its first trial."""
        started_at = time.time()
        sent = self.send(order)
        gives_up_at = float("inf")
        waits_for_a_host = False
        while not sent.wait(_POLL_S):
            with self._lock:
                self._cluster.refresh()
            if not waits_for_a_host and not self._cluster.has_room_for(self._share):
                waits_for_a_host = True
                note(
                    f"waiting for a host: the cluster has no {self._share.hosts} with "
                    f"{self._share.slots} {self._share.resource} slot(s) any more"
                )
            if cancelled.is_set() and gives_up_at == float("inf"):
                gives_up_at = time.monotonic() + _PATIENCE_S
                self._cluster.cancel()
            if time.monotonic() >= gives_up_at:
                sent.abandon()
                return unstarted(order.plans[0], Outcome.CANCELLED, "Cancelled before a host had room for it.")
        try:
            delivery = sent.delivery()
        except HostLostError as error:
            # Its ranks may still run if only Ray's processes have died.
            self._cluster.cancel(order.name)
            if cancelled.is_set():
                return unstarted(order.plans[0], Outcome.CANCELLED, "Cancelled while it ran.")
            said = f"The host died while the trial ran: {error}"
            lost = unstarted(order.plans[0], Outcome.CRASHED, said, from_outside=True)
            return lost.model_copy(update={"started_at": started_at})
        for text in delivery.notes:
            note(text)
        return delivery

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """See `Place.build`. Every host builds its ops when it joins, so this does nothing."""
        return {}

    @property
    def has_compiled(self) -> bool:
        """See `Place.has_compiled`. A host that joins builds before it runs a trial."""
        return False

    def prime(self, imported: Sequence[Import]) -> None:
        """See `Place.prime`."""
        self._cluster.prime(imported)

    def close(self) -> None:
        """See `Place.close`."""
        self._cluster.close()


def _write(path: Path, result: TrialResult) -> None:
    write_whole(path, result.model_dump_json(indent=2))
