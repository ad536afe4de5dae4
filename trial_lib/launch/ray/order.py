"""The messages to the hosts of a Ray cluster and back. They are plain data, and no file has them."""

from dataclasses import dataclass, field

from trial_lib.launch.rank_starter import ProcessesEnd
from trial_lib.launch.ray.transfer import FileContents
from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.result import TrialResult

NAMESPACE = "zerotune"


@dataclass(frozen=True)
class ClusterShare:
    """The part of a cluster that a trial takes.

    Attributes:
        resource: Ray's name of a slot: `GPU` or `CPU`.
        slots: the number of slots on each host.
        hosts: the number of hosts.
    """

    resource: str
    slots: int
    hosts: int


@dataclass(frozen=True)
class ClusterOrder:
    """Work for the cluster: one trial, or a sweep of several on one host.

    Attributes:
        study_id: the study's id.
        plans: the plans of its trials.
        share: the part of the cluster that it takes.
        sweep: the search's order. None for a single trial.
    """

    study_id: str
    plans: tuple[TrialPlan, ...]
    share: ClusterShare
    sweep: Sweep | None = None

    @property
    def name(self) -> str:
        """The order's name, unique among all studies."""
        return self.plans[0].trial_id


@dataclass(frozen=True)
class Delivery:
    """The answer to an order.

    Attributes:
        ends: for an order on one host: the result of each plan, with the driver's paths, or the reason for none.
        ending: for an order on several hosts: the end of the ranks on all of them.
        kernel_killed: for an order on several hosts: whether the out-of-memory killer struck on one of them.
        files: the files that the ranks of each plan have left.
        notes: sentences for the user on anything that delayed the order.
    """

    ends: list[TrialResult | Withdrawal] = field(default_factory=list)
    ending: ProcessesEnd | None = None
    kernel_killed: bool | None = False
    files: list[FileContents] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def actor_name(study_id: str, node_id: str) -> str:
    """Returns the name of a study's actor on a node."""
    return f"zerotune-{study_id}-{node_id}"
