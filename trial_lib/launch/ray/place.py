"""The hosts of a Ray cluster as a place where trials run; the study's folder stays the driver's."""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from trial_lib.launch.place import Note, OnResult
from trial_lib.launch.ray.cluster import RayCluster
from trial_lib.launch.ray.order import ClusterOrder, ClusterShare, Delivery
from trial_lib.launch.ray.transfer import unpack
from trial_lib.launch.trial import TrialPlan, clear, take_result, unstarted, write_candidate, write_unstarted
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.wire.whole_files import write_whole

_POLL_S = 0.5
# From a cancellation to the end of the ranks on all hosts.
_PATIENCE_S = 10.0


class HostLostError(Exception):
    """What an order ran on is gone: a host, or Ray's processes there."""


class Sent(Protocol):
    """An order that the cluster has been given."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; returns whether it has come."""

    def delivery(self) -> Delivery:
        """Returns what came back.

        Raises:
            HostLostError: nothing will.
        """

    def abandon(self) -> None:
        """Takes it back where it still waits for slots."""


class RayPlace:
    """Has a cluster run trials.

    Args:
        study_id: the study's.
        cluster: its actors.
        share: what each trial takes.

    Attributes:
        send: gives an order to the cluster.
        can_sweep: whether a trial has all its ranks on one host: only there are the files that a sweep is steered by.
    """

    send: Callable[[ClusterOrder], Sent]

    def __init__(self, study_id: str, cluster: RayCluster, share: ClusterShare) -> None:
        self._study_id = study_id
        self._cluster = cluster
        self._share = share
        self.can_sweep = share.hosts == 1
        self._lock = threading.Lock()

    def run_trial(self, plan: TrialPlan, cancelled: threading.Event, note: Note) -> TrialResult:
        """See `Place.run_trial`."""
        started_at = time.time()
        write_candidate(plan)
        clear(plan)
        delivery = self._carried_out(ClusterOrder(self._study_id, (plan,), self._share), cancelled, note)
        if isinstance(delivery, TrialResult):
            write_unstarted(plan, delivery)
            return delivery
        unpack(delivery.files[0], plan.paths.root)
        if delivery.ending is not None:
            device = "cuda" if self._share.resource == "GPU" else "cpu"
            seconds = time.time() - started_at
            return take_result(plan, delivery.ending, delivery.kernel_killed, device, started_at, seconds)
        (result,) = delivery.ends
        assert isinstance(result, TrialResult)
        _write(plan.paths.result, result)
        return result

    def run_sweep(
        self, plans: Sequence[TrialPlan], sweep: Sweep, cancelled: threading.Event, note: Note, measured: OnResult
    ) -> list[TrialResult | Withdrawal]:
        """See `Place.run_sweep`: the results come back together, when the last size has ended."""
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
        """Returns what came back of an order; the result of its first trial where nothing has."""
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
            # Its ranks may still run where Ray's processes alone have died.
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
        """See `Place.build`: every host builds what it was told to when it joined."""
        return {}

    def prime(self, modules: list[str]) -> None:
        """See `Place.prime`."""
        self._cluster.prime(modules)

    def close(self) -> None:
        """See `Place.close`."""
        self._cluster.close()


def _write(path: Path, result: TrialResult) -> None:
    write_whole(path, result.model_dump_json(indent=2))
