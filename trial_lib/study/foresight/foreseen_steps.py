"""The foreseen step of each trial of a study, from the foreseen runs of its arms."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trial_lib.command.switches import switches_of, unforeseen_switches
from trial_lib.device.host.base import Host
from trial_lib.foresee.plan.arm_runs import ArmRuns
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.foresee.plan.kept_runs import read_kept_run
from trial_lib.foresee.plan.own_devices import own_kind
from trial_lib.foresee.plan.plan_record import write_run
from trial_lib.foresee.time.devices import Cluster, known_devices
from trial_lib.memory.zero_settings import ArmKey, arm_key
from trial_lib.records.candidate import Candidate
from trial_lib.search.expected_arms import key_in_plan
from trial_lib.wire.foreseen_run import ForeseenRun

_END = ".json.gz"


@dataclass(frozen=True)
class ForeseenSteps:
    """The steps of a program on the slots of a study.

    Attributes:
        runs: of each arm that was foreseen.
        cluster: the slots; None if they are no known devices, so that steps have no seconds.
        replicas: of the model on the slots; None for those of the runs.
    """

    runs: Mapping[ArmKey, ArmRuns]
    cluster: Cluster | None = None
    replicas: int | None = None

    def of(self, candidate: Candidate, base_config: Mapping[str, Any]) -> tuple[str, ForeseenRun] | None:
        """Returns the label of a candidate's arm, and its foreseen step; None if none was foreseen.

        Args:
            candidate: of a trial.
            base_config: the user's DeepSpeed configuration, as far as it is known.
        """
        config = candidate.complete(base_config)
        foreseen = {place for runs in self.runs.values() for place in switches_of(runs.small.ds_config)}
        runs = self.runs.get(key_in_plan(config, base_config, foreseen))
        if runs is None or unforeseen_switches(candidate.knobs, base_config, foreseen):
            return None
        size, accumulation = candidate.micro_batch_size, max(1, candidate.gradient_accumulation_steps)
        # The candidate's own settings decide what goes on beside the computation.
        step = runs.step_at(self.replicas or runs.small.replicas, size, accumulation)
        return runs.arm.label, replace(step, micro_batch=size, ds_config=config)


def cluster_here(host: Host, slots: int, hosts: int) -> Cluster | None:
    """Returns the devices of a trial; None if they are no known ones. A CPU is none.

    Args:
        host: has the slots, or is one of the hosts that have them.
        slots: devices of a trial.
        hosts: that a trial takes.
    """
    found = own_kind(host, known_devices()) if host.models else None
    return None if found is None else Cluster(device=found, hosts=hosts, per_host=slots // hosts)


def keep_steps(run: ForeseenRun, label: str, folder: Path) -> None:
    """Writes the operations of a foreseen run, from which its seconds follow. Its storages are left out.

    Args:
        run: of one of a study's arms.
        label: of the arm.
        folder: of the study.
    """
    write_run(folder / f"{label}-mbs{run.micro_batch}{_END}", replace(run, storages=(), events=()))


def kept_steps(folder: Path, cluster: Cluster | None) -> ForeseenSteps:
    """Returns the steps of a study that foresaw its own program.

    Args:
        folder: that `keep_steps` has written. It may be missing.
        cluster: the slots.

    Raises:
        InputError: a file is damaged.
    """
    by_arm: dict[str, list[ForeseenRun]] = {}
    for file in sorted(folder.glob(f"*{_END}")):
        by_arm.setdefault(file.name.rpartition("-mbs")[0], []).append(read_kept_run(file))
    runs: dict[ArmKey, ArmRuns] = {}
    for label, found in by_arm.items():
        small, *larger = sorted(found, key=lambda run: run.micro_batch)
        runs[arm_key(small.ds_config)] = ArmRuns(PlanArm(label, {}), small, larger[-1] if larger else None)
    return ForeseenSteps(runs, cluster)
