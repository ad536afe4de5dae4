"""What travels to the hosts of a Ray cluster and back: plain data, and no record of anything."""

from dataclasses import dataclass, field

from trial_lib.launch.rank_starter import ProcessesEnd
from trial_lib.launch.ray.transfer import FileContents
from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Sweep, Withdrawal
from trial_lib.records.result import TrialResult

NAMESPACE = "zerotune"


@dataclass(frozen=True)
class ClusterShare:
    """What a trial takes of a cluster.

    Attributes:
        resource: what Ray calls a slot: `GPU` or `CPU`.
        slots: on each host.
        hosts: that it spans.
    """

    resource: str
    slots: int
    hosts: int


@dataclass(frozen=True)
class ClusterOrder:
    """Work for the cluster: one trial, or a sweep of several on one host.

    Attributes:
        study_id: whose it is.
        plans: of its trials.
        share: what it takes.
        sweep: what the search asked for; None for a single trial.
    """

    study_id: str
    plans: tuple[TrialPlan, ...]
    share: ClusterShare
    sweep: Sweep | None = None

    @property
    def name(self) -> str:
        """Unique among the orders of all studies."""
        return self.plans[0].trial_id


@dataclass(frozen=True)
class Delivery:
    """What comes back.

    Attributes:
        ends: of an order for one host: for each plan its result, with the driver's paths, or why there is none.
        ending: of an order for several: how the ranks on all of them ended.
        kernel_killed: of the same: whether the kernel's out-of-memory killer struck on one of the hosts.
        files: what the ranks of each plan have left.
        notes: what held it up, for people.
    """

    ends: list[TrialResult | Withdrawal] = field(default_factory=list)
    ending: ProcessesEnd | None = None
    kernel_killed: bool = False
    files: list[FileContents] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def actor_name(study_id: str, node_id: str) -> str:
    """Returns the name of the actor that a study has on a node."""
    return f"zerotune-{study_id}-{node_id}"
