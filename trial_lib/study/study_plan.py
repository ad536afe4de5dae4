"""The plan that a study begins with: its arms' order and memory, and what it foresees for each trial."""

import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import ranks_of_a_replica
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import OWNERS_FILE, make_own_folder, write_whole
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.plan.arm_bytes import foreseen_arm
from zerotune.trial_lib.plan.arms import check_groups
from zerotune.trial_lib.plan.devices import Cluster, DeviceFigures, own_kind
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, PlanRecord, kept_runs, wider_runs
from zerotune.trial_lib.plan.scaling import ArmRuns
from zerotune.trial_lib.plan.step_time import flops_per_sample
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.switches import switches_of, unforeseen_switches
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.base import ExpectedArm, key_in_plan
from zerotune.trial_lib.search.zero_settings import ArmKey, ZeroSettings, arm_key
from zerotune.trial_lib.study.folder import read_record_file

# The file of a plan that a study begins with, and its copy in the study's folder.


_WHERE = "--plan"
_REMEDY = "Name the folder of a plan in zerotune-plans, or the plan.json there."


def read_plan_file(given: Path) -> tuple[PlanPaths, PlanRecord]:
    """The files and the record of a plan, given by its plan.json or its folder.

    Raises InputError if there is no plan, it is damaged, or it has foreseen nothing.
    """
    paths = PlanPaths(given if given.is_dir() else given.parent)
    file = paths.record if given.is_dir() else given
    try:
        record = read_record_file(file, PlanRecord, "the plan", _REMEDY)
    except FileNotFoundError:
        said = "this folder has no plan.json." if given.is_dir() else "there is no such file."
        raise InputError(said, where=f"{_WHERE} {given}", remedy=_REMEDY) from None
    if not any(arm for devices in record.devices for arm in devices.arms if not arm.stopped):
        raise InputError(
            "this plan has foreseen no configuration, so a study cannot begin with it.",
            where=f"{_WHERE} {given}",
            remedy="Leave --plan out, or make a plan that foresees some.",
        )
    return paths, record


GivenPlan = tuple[PlanPaths, PlanRecord]


def keep_plan(plan: PlanPaths, record: PlanRecord, folder: Path) -> None:
    """Copies a plan into the folder of a study, which is complete without the plan's own."""
    kept = PlanPaths(folder)
    make_own_folder(kept.runs)
    arms = [arm for devices in record.devices for arm in devices.arms]
    named = [plan.run(name) for arm in arms for name in arm.runs]
    for file in dict.fromkeys([*named, *(file for arm in arms for file in wider_runs(arm, plan))]):
        if file.is_file():
            shutil.copyfile(file, kept.runs / file.name)
            (kept.runs / file.name).chmod(OWNERS_FILE)
    write_whole(kept.record, record.model_dump_json(), mode=OWNERS_FILE)


# An arm that fits with a smaller probability, and whose 90 % interval is above the device's memory, is not tried.
_HOPELESS = 0.01
_SAME_MODEL = 0.01
# Recomputed activations add a third to the work of a sample. Other lengths of sequences change it by more.
_SAME_WORK = 2.0


@dataclass(frozen=True)
class StudyPlan:
    record: PlanRecord  # of the plan. It has the devices that are nearest to the slots, and no others.
    runs: Mapping[str, ArmRuns]  # the foreseen runs by the arm's label. Empty if the plan came without them.
    slots: int  # devices of a trial
    device: str  # `cuda` or `cpu`
    # The slots, if they are of the plan's kind. Otherwise None, and speeds say nothing but an order.
    cluster: Cluster | None = None

    @property
    def devices(self) -> PlannedDevices:
        return self.record.devices[0]

    @cached_property
    def replicas(self) -> int:
        ranks = ranks_of_a_replica(self.record.ds_config)
        run = next((runs.small for runs in self.runs.values() if not runs.stopped), None)
        if run is not None:
            # The code may divide the ranks, as a pipeline does into stages.
            ranks = max(ranks, run.world // max(1, run.replicas))
        return max(1, self.slots // ranks)

    @cached_property
    def foreseen(self) -> tuple[ForeseenArm, ...]:
        """The memory of the arms on so many slots; none if the plan came without its runs."""
        at_replicas = [runs.at_replicas(self.replicas) for runs in self.runs.values() if not runs.stopped]
        found = (foreseen_arm([run for run in runs if run is not None], self.device) for runs in at_replicas)
        return tuple(arm for arm in found if arm is not None)

    @cached_property
    def expected(self) -> tuple[ExpectedArm, ...]:
        return tuple(
            ExpectedArm(
                key=self.key_of(arm),
                label=arm.label,
                micro_batch=arm.micro_batch,
                samples_per_s=0.0 if arm.samples_per_s is None else arm.samples_per_s.value,
                speeds=arm.speeds,
                apart=self._apart(arm),
                is_first=bool(self.devices.best) and arm.label == self.devices.best,
                no_room=self._no_room(arm),
                switches=frozenset(switches_of(arm.ds_config or arm.knobs)),
            )
            for arm in self.devices.arms
            if not arm.stopped
        )

    def key_of(self, arm: PlannedArm) -> ArmKey:
        # An arm that was not run has no complete configuration.
        return arm_key(arm.ds_config or overwrite_deepspeed_config(self.record.ds_config, arm.knobs))

    def told(self) -> Iterator[str]:
        """What the study takes from the plan, in sentences for its log."""
        devices, chosen = self.devices, self.devices.chosen
        first = "" if chosen is None else f" It tries {chosen.label} first, with a micro-batch of {chosen.micro_batch}"
        nothing = " Its speeds contradict themselves." if devices.contradiction else " It says that nothing fits there."
        more = ", or with a smaller one if less fits here." if first else nothing
        here = "these devices" if self.cluster is not None and devices.count == self.slots else devices.label
        yield f"The search begins with the plan {self.record.plan_id} for {here}.{first}{more}"
        if self.cluster is None:
            other = f"This host's devices are not {devices.device}"
            if figures_of(devices) is None:
                other = f"The plan's figures of {devices.device} are of another version"
            yield f"{other}, so the plan gives an order of arms and no speeds."
        if not self.runs:
            yield "The plan came without its folder `runs`, so formulas give the memory of its arms."

    def unlike(self, profile: ModelProfile, base_config: Mapping[str, Any]) -> str:
        """Why the plan is not of the program that a profile trial has found, as a clause; empty if it may be."""
        planned, found = self.record.parameters, profile.num_params
        # Of a pipeline, a plan knows the first stage alone.
        if not profile.pipeline_parallel and planned and abs(planned - found) > _SAME_MODEL * found:
            return f"is for a model with {planned:,} parameters, and this one has {found:,}"
        other = unlike_precision(self.record.ds_config, base_config)
        if other:
            return other
        of_plan, here = self._flops_per_sample, profile.flops_per_sample
        if of_plan and here and not profile.pipeline_parallel and not 1 / _SAME_WORK < of_plan / here < _SAME_WORK:
            return f"is for samples of {of_plan:.2g} FLOPs, and these take {here:.2g}, so they have other shapes"
        return ""

    def left_out(self, unlike: str) -> str:
        """The sentences of a study that goes on without the plan, because the plan is `unlike` its program."""
        made_for = f" It was made for: {shlex.join(self.record.command)}." if self.record.command else ""
        return (
            f"The study goes on without the plan {self.record.plan_id}, because the plan {unlike}.{made_for} "
            "Make a plan of this program, if you want to begin with one."
        )

    @cached_property
    def _flops_per_sample(self) -> float:
        # FLOPs of one sample in the user's own arm; 0 if the plan came without its run.
        own = next((runs for runs in self.runs.values() if runs.arm.is_own and not runs.stopped), None)
        return 0.0 if own is None else flops_per_sample(own.small)

    def run_of(self, candidate: Candidate, base_config: Mapping[str, Any]) -> tuple[str, ForeseenRun] | None:
        """The label of a candidate's arm, and its foreseen step on the slots; None if none was foreseen."""
        config, runs = candidate.complete(base_config), self._runs_by_key
        foreseen = {place for each in runs.values() for place in switches_of(each.small.ds_config)}
        found = runs.get(key_in_plan(config, base_config, foreseen))
        if found is None or unforeseen_switches(candidate.knobs, base_config, foreseen):
            return None
        size, accumulation = candidate.micro_batch_size, max(1, candidate.gradient_accumulation_steps)
        # The candidate's own settings decide what goes on beside the computation.
        return found.arm.label, replace(
            found.step_at(self.replicas, size, accumulation), micro_batch=size, ds_config=config
        )

    @cached_property
    def _runs_by_key(self) -> Mapping[ArmKey, ArmRuns]:
        arms = {arm.label: arm for arm in self.devices.arms}
        return {self.key_of(arms[label]): runs for label, runs in self.runs.items() if not runs.stopped}

    def _apart(self, arm: PlannedArm) -> float:
        # On other devices each arm may be off by all that the interval of its speed leaves open.
        speed = arm.samples_per_s
        return arm.apart if self.cluster is not None or speed is None else speed.high / speed.value

    def _no_room(self, arm: PlannedArm) -> str:
        # Why an arm cannot fit on the slots; empty if it may, or if the plan is for others.
        if self.cluster is None or self.slots > self.devices.count or arm.peak is None:
            return ""
        if arm.fits >= _HOPELESS or arm.largest_micro_batch or arm.peak.low <= self.devices.memory:
            return ""
        return f"it needs {bytes_shown(arm.peak.value)} of {bytes_shown(self.devices.memory)} on {self.devices.device}."


def unlike_precision(planned: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """How the precisions of a plan's and of a study's configuration differ, as a clause; empty if they do not."""
    of_plan, here = (8 * ZeroSettings.of(config).precision.bytes_per_param for config in (planned, found))
    if of_plan == here:
        return ""
    return f"is for parameters of {of_plan} bits, and this configuration has {here} bits"


def figures_of(devices: PlannedDevices) -> DeviceFigures | None:
    """The figures of a plan's devices; None if the plan is of another version."""
    try:
        return DeviceFigures(**devices.figures)
    except TypeError:
        return None


def devices_for(record: PlanRecord, host: Host, slots: int) -> tuple[PlannedDevices, bool]:
    """The devices of a plan that are nearest to some slots, and whether they are of the same kind.

    The kind counts first, then the number, then the plan's answer.
    """
    known = {each.device: figures for each in record.devices if (figures := figures_of(each)) is not None}
    own = own_kind(host, known)
    answer = None if record.best is None else record.devices[record.best]

    def likeness(each: PlannedDevices) -> tuple[bool, float, bool]:
        return own is not None and each.device == own.name, -abs(log(each.count / slots)), each is answer

    found = max(record.devices, key=likeness)
    return found, likeness(found)[0]


def plan_for(record: PlanRecord, host: Host, slots: int) -> PlanRecord:
    devices, _ = devices_for(record, host, slots)
    return record.model_copy(update={"devices": (devices,), "best": 0 if devices.best else None})


def study_plan(folder: Path, host: Host, slots: int, hosts: int = 1) -> StudyPlan | None:
    """The plan that a study has kept; None if it began with none. Raises InputError if the copy is damaged."""
    if not PlanPaths(folder).record.is_file():
        return None
    paths, record = read_plan_file(folder)
    devices, is_here = devices_for(record, host, slots)
    figures = figures_of(devices) if is_here else None
    cluster = None if figures is None else Cluster(device=figures, hosts=hosts, per_host=slots // hosts)
    return StudyPlan(record, kept_runs(devices, paths), slots, host.device, cluster)


# The plan that a study is asked to begin with, checked before anything is started.

_SECTIONS = ("fp16", "bf16", "bfloat16")


def read_given_plan(
    given: Path, host: Host, slots: int, ds_config: Mapping[str, Any], stages: Collection[int]
) -> GivenPlan:
    """The files of a plan, and the plan with nothing but the devices that are nearest to some slots.

    It is checked against all that a study knows before its profile trial: InputError says that there is no plan, it or
    one of its runs is damaged, it has foreseen nothing, it is of another precision, its groups of ranks do not go on so
    many slots, or it has none of the stages.
    """
    paths, record = read_plan_file(given)
    record, where = plan_for(record, host, slots), f"--plan {given}"
    (devices,) = record.devices
    # A damaged run would end the study when it has its folder.
    kept_runs(devices, paths)
    check_groups(record.ds_config, slots, where)
    unlike = unlike_precision(record.ds_config, ds_config) if _states_precision(ds_config) else ""
    if unlike:
        raise InputError(
            f"the plan {unlike}.", where=where, remedy="Make a plan of this configuration, or leave --plan out."
        )
    configs = [arm.ds_config for arm in devices.arms if not arm.stopped and arm.ds_config]
    planned = {ZeroSettings.of(config).stage for config in configs}
    if planned and not planned & set(stages):
        raise InputError(
            f"the plan has ZeRO {_listed(planned)}, and the study may use {_listed(stages)}.",
            where=where,
            remedy=f"Ask for stages of the plan (--zero-stages {min(planned)}), or leave --plan out.",
        )
    return paths, record


def _states_precision(ds_config: Mapping[str, Any]) -> bool:
    # Whether a configuration alone decides on 16 bits. Code may set what it lacks, or has as "auto".
    stated = [ds_config[name].get("enabled") for name in _SECTIONS if isinstance(ds_config.get(name), Mapping)]
    return bool(stated) and all(type(enabled) is bool for enabled in stated)


def _listed(stages: Collection[int]) -> str:
    return " and ".join(str(stage) for stage in sorted(stages))
