"""The runs that a plan needs of its arms, and those that it can do without if runs take long. Pure."""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun
from zerotune.trial_lib.plan.answer import memory_bound
from zerotune.trial_lib.plan.arms import PlanArm, run_overrides, with_switches
from zerotune.trial_lib.plan.devices import AskedDevices
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedRange
from zerotune.trial_lib.plan.scaling import ArmRuns, Growth, growth_between, persistent
from zerotune.trial_lib.records.switches import switch_key, switches_of
from zerotune.trial_lib.search.cost_model import prior_costs
from zerotune.trial_lib.search.knobs import Arm, get_knob
from zerotune.trial_lib.search.sizes import BatchPolicy

AFFORDABLE_S = 45.0
"""Seconds that all runs of a plan may take if it has more than one of each arm. The whole then takes a minute."""

_MARGIN = 1.1
_LONGEST = 120  # characters of a label in a file's name
_FORWARD, _BACKWARD = MOMENTS.index("forward"), MOMENTS.index("backward")
_DEVICE = PLACES.index("device")
# The first ZeRO stage that partitions a kind of state, and the section that offloads it. Reduced gradients go where the
# optimizer is (Ren et al., ZeRO-Offload, arXiv 2101.06840, section 4).
_STATES = {
    "parameter": (3, "offload_param"),
    "gradient": (2, "offload_optimizer"),
    "optimizer": (1, "offload_optimizer"),
}
_OFFLOADS = sorted({section for _, section in _STATES.values()})


@dataclass(frozen=True, kw_only=True)
class WantedRun:
    name: str  # unique in the plan, such as `z3-mbs1-of8`
    # What it changes in the DeepSpeed configuration; empty for the program as typed. The section `program` has the
    # program's switches.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = False  # whether it is the first, which finds out what the program is
    is_ahead: bool = False  # whether it goes on beside the first
    asked: AskedDevices  # devices that it finds, one of which is its rank's


def pair_of(policy: BatchPolicy, own: int) -> tuple[int, ...]:
    """The one or two micro-batch sizes to run, ascending: `own`, at which the program ran as typed, and a neighbour."""
    sizes = policy.sizes()
    if own not in sizes:
        return sizes[:2]
    place = sizes.index(own)
    return sizes[place : place + 2] if place + 1 < len(sizes) else sizes[max(0, place - 1) :]


def micro_batches_of_a_run(accumulation: int, pipeline_stages: int = 1) -> int:
    """Returns how many micro-batches a step of a foreseen run has.

    Two show all that more of them would: gradients that are kept, and reductions that are left out. The first stage of
    a pipeline holds the activations of as many as there are stages (`num_pipe_buffers` in DeepSpeed's
    runtime/pipe/schedule.py). One more, and it holds them beside all gradients. The runs of a pipeline have so many at
    every size, because one line through two sizes needs as many in both. So the memory of a size with fewer
    micro-batches in its step is an upper bound.
    """
    return min(2, accumulation) if pipeline_stages == 1 else pipeline_stages + 1


def wanted_run(
    arm: PlanArm, asked: AskedDevices, policy: BatchPolicy, size: int, pipeline_stages: int = 1
) -> WantedRun:
    candidate = arm.candidate(policy, size, asked.count)
    steps = micro_batches_of_a_run(candidate.gradient_accumulation_steps, pipeline_stages)
    few = candidate.model_copy(update={"gradient_accumulation_steps": steps})
    overrides = run_overrides(few)
    return WantedRun(name=run_name(arm.label, size, asked.count), overrides=overrides, asked=asked)


def run_name(label: str, micro_batch: int, ranks: int) -> str:
    return f"{file_word(label)}-mbs{micro_batch}-of{ranks}"


def file_word(label: str) -> str:
    """An arm's label in a file's name. A switch may have a path in its name, or a long value."""
    word = re.sub(r"[^\w.,+=-]", "_", label)
    if word == label and len(label) <= _LONGEST:
        return label
    return f"{word[:_LONGEST]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def cheapest_first(arms: Sequence[PlanArm], typed: ForeseenRun) -> list[PlanArm]:
    """The arms by their expected cost. A tie leaves them in their order."""
    costs = prior_costs([_as_arm(arm, typed) for arm in arms])
    return [arms[index] for index in sorted(range(len(arms)), key=costs.__getitem__)]


class ArmWork:
    """The runs of a plan's arms, the user's own first, on the devices `base`. Batches are by number of devices."""

    def __init__(
        self, arms: Sequence[PlanArm], base: AskedDevices, policies: Mapping[int, BatchPolicy], typed: ForeseenRun
    ) -> None:
        self._arms = arms
        self._base = base
        self._policies = policies
        self._policy = policies[base.count]
        self._own_size = typed.micro_batch
        self._sizes = pair_of(self._policy, typed.micro_batch)
        self._ordered = cheapest_first(arms, typed)
        self._typed = typed
        self._growths: dict[str, Growth | None] = {}
        self._others: list[AskedDevices] = []  # devices of another number, one at most

    @property
    def small(self) -> list[WantedRun]:
        """One run of each arm. The long ones come first, or a core would wait for the last of them."""
        longest_first = sorted(self._ordered, key=lambda arm: _duration(arm, self._typed), reverse=True)
        return [self._run(arm, self._sizes[0]) for arm in longest_first]

    @property
    def own_larger(self) -> list[WantedRun]:
        """The run of the user's own arm at the larger size, which every plan has, and of one arm of other switches."""
        return [self._run(arm, size) for size in self._sizes[1:] for arm in self._leaders(self._arms)]

    def more(self, runs: Mapping[str, ForeseenRun], processes: int) -> list[WantedRun]:
        """The further runs: at a larger size, and on another number of devices, if they can be afforded.

        Without them the growth of the user's own arm stands for that of all arms with its switches, and one arm of
        other switches for those. A formula divides the states.
        """
        whole = [arm for arm in self._ordered if not runs[self._name(arm, self._sizes[0])].stopped]
        seconds = {arm.label: runs[self._name(arm, self._sizes[0])].seconds for arm in whole}
        further: list[WantedRun] = []
        for arm in sorted(whole, key=lambda each: seconds[each.label], reverse=True):
            further += [self._run(arm, size) for size in self._sizes[1:]]
            further += [self._run(arm, self._sizes[0], other) for other in self._others]
        expected = sum(seconds.values()) / max(1, len(seconds)) * len(further)
        if (sum(run.seconds for run in runs.values()) + expected) / processes <= AFFORDABLE_S:
            return further
        return [self._run(arm, size) for size in self._sizes[1:] for arm in self._leaders(whole)]

    def unlike(self, runs: Mapping[str, ForeseenRun]) -> list[WantedRun]:
        """Further runs at the larger size: of arms that no arm with two runs has the operations of.

        One of each stage comes first, because others may grow as it does. Ask again after them.
        """
        found: dict[tuple[Any, ...], WantedRun] = {}
        for arm in self._ordered:
            names = self._names(arm, runs)
            if len(names) > 1 or len(self._sizes) == 1 or runs[names[0]].stopped or self.ignores_size(runs):
                continue
            small = with_switches(runs[names[0]], arm.knobs)
            if self._grown(small, arm, runs) is None:
                found.setdefault((small.stage, switch_key(arm.knobs)), self._run(arm, self._sizes[1]))
        return list(found.values())

    def _leaders(self, arms: Sequence[PlanArm]) -> list[PlanArm]:
        found: dict[tuple[tuple[str, str], ...], PlanArm] = {}
        for arm in sorted(arms, key=lambda each: not each.is_own):
            found.setdefault(switch_key(arm.knobs), arm)
        return list(found.values())

    def foreseen(self, runs: Mapping[str, ForeseenRun]) -> list[ArmRuns]:
        return [self._of_arm(arm, runs) for arm in self._arms]

    def _of_arm(self, arm: PlanArm, runs: Mapping[str, ForeseenRun]) -> ArmRuns:
        names = self._names(arm, runs)
        if self.ignores_size(runs) and self._own_size in self._sizes:
            # All runs had the program's own batches, whatever size was asked for.
            one = with_switches(runs[names[0]], arm.knobs)
            return ArmRuns(arm, replace(one, micro_batch=self._own_size), names=(names[0],))
        small = with_switches(runs[names[0]], arm.knobs)
        large = with_switches(runs[names[1]], arm.knobs) if len(names) > 1 else self._grown(small, arm, runs)
        others = [name for other in self._others if (name := self._name(arm, self._sizes[0], other)) in runs]
        return ArmRuns(arm, small, large, runs[others[0]] if others else None, tuple(names))

    def ignores_size(self, runs: Mapping[str, ForeseenRun]) -> bool:
        """Whether the program's batches stay as they are when it is asked for another size.

        A program may make its batches anywhere, so the work of a pass shows their size.
        """
        for arm in self._arms:
            pair = [runs[name] for name in self._names(arm, runs)]
            if len(pair) > 1 and not any(run.stopped for run in pair):
                before, after = map(_first_work, pair)
                return bool(before) and before == after
        return False

    def _names(self, arm: PlanArm, runs: Mapping[str, ForeseenRun]) -> list[str]:
        return [name for size in self._sizes if (name := self._name(arm, size)) in runs]

    def _grown(self, small: ForeseenRun, of: PlanArm, runs: Mapping[str, ForeseenRun]) -> ForeseenRun | None:
        # A run at the larger size by the growth of another arm with its switches; None if none is known.
        if small.stopped:
            return None
        for arm in self._arms:
            if switch_key(arm.knobs) != switch_key(of.knobs):
                # It may keep other activations.
                continue
            names = self._names(arm, runs)
            pair = [runs[name] for name in names]
            if len(pair) > 1 and not any(run.stopped for run in pair):
                # A growth takes as long as a replay, and all arms without a pair ask for the same.
                if names[0] not in self._growths:
                    self._growths[names[0]] = growth_between(*pair)
                growth = self._growths[names[0]]
                grown = None if growth is None else growth.of_another_arm(small)
                if grown is not None:
                    return grown
        return None

    def also_on(self, asked: Sequence[AskedDevices]) -> None:
        """Adds the first other number of devices, which shows how states are divided.

        The program finds the devices of all other runs, because it may compute otherwise on other ones.
        """
        for each in asked:
            if 1 < each.count != self._base.count and self._sizes[0] in self._policies[each.count].sizes():
                self._others = [replace(each, cluster=replace(each.cluster, device=self._base.cluster.device))]
                return

    def _run(self, arm: PlanArm, size: int, asked: AskedDevices | None = None) -> WantedRun:
        on = asked or self._base
        return wanted_run(arm, on, self._policies[on.count], size, self._typed.pipeline_stages)

    def _name(self, arm: PlanArm, size: int, asked: AskedDevices | None = None) -> str:
        return run_name(arm.label, size, (asked or self._base).count)


def hopeless_arms(
    arms: Sequence[PlanArm],
    typed: ForeseenRun,
    devices: Sequence[AskedDevices],
    headroom: float,
    resizing: Collection[str] = (),
) -> tuple[PlanArm, ...]:
    """The arms whose states alone exceed a device of every kind and number.

    The user's own is always run. So are arms with `resizing` switches, which change the program's number of parameters.
    """
    return tuple(
        arm
        for arm in arms
        if not arm.is_own
        and not switches_of(arm.knobs).keys() & set(resizing)
        and all(
            sum(_states_of(arm, typed, each.count).values()) > _MARGIN * each.cluster.device.memory * (1 - headroom)
            for each in devices
        )
    )


def hopeless_row(arm: PlanArm, typed: ForeseenRun, count: int) -> PlannedArm:
    memory = _states_of(arm, typed, count)
    total = sum(memory.values())
    return PlannedArm(
        label=arm.label,
        knobs=dict(arm.knobs),
        switches=dict(arm.switches),
        micro_batch=typed.micro_batch,
        accumulation=typed.accumulation,
        # Activations are not counted, so there may be more.
        peak=PlannedRange(value=total, low=total, high=2 * total),
        peak_moment="update",
        memory=memory,
        memory_bound=memory_bound(memory),
    )


def _states_of(arm: PlanArm, typed: ForeseenRun, count: int) -> dict[str, float]:
    # The bytes of states on a device, by kind, in an arm on a number of devices.
    of_replica = max(1, typed.world // max(1, typed.replicas))
    replicas = max(1, count // of_replica)
    stage = get_knob(arm.knobs, "zero_optimization.stage", typed.stage)
    bytes_ = dict.fromkeys(_STATES, 0.0)
    for index in persistent(typed):
        storage = typed.storages[index]
        # The host's gradients of an offloaded optimizer are copies, which no other arm has.
        is_copy = KINDS[storage.kind] == "gradient" and storage.place != _DEVICE
        if KINDS[storage.kind] in bytes_ and not is_copy:
            bytes_[KINDS[storage.kind]] += storage.size
    states = {}
    for kind, (first, offload) in _STATES.items():
        whole = bytes_[kind] * (typed.replicas if typed.stage >= first else 1)
        if offload and get_knob(arm.knobs, f"zero_optimization.{offload}.device") not in (None, "none"):
            continue
        states[kind] = whole / (replicas if stage >= first else 1)
    return states


def _first_work(run: ForeseenRun) -> list[tuple[int, float, float]]:
    """The operations of the first forward pass: kind, FLOPs and bytes of each.

    If the program calls its module and not the engine, those of the first backward pass.
    """
    stretches = list(run.operations_by_moment())
    for name in (_FORWARD, _BACKWARD):
        for moment, operations in stretches:
            if moment.name == name and operations:
                return [(each.kind, each.flops, each.moved) for each in operations]
    return []


def _duration(arm: PlanArm, typed: ForeseenRun) -> tuple[int, int]:
    # A key that rises with the seconds of an arm's run. At stage 3 DeepSpeed has hooks on each module.
    knobs = _as_arm(arm, typed).knobs
    devices = [get_knob(knobs, f"zero_optimization.{each}.device") for each in _OFFLOADS]
    return get_knob(knobs, "zero_optimization.stage", 0), sum(each not in (None, "none") for each in devices)


def _as_arm(arm: PlanArm, typed: ForeseenRun) -> Arm:
    zero = {"stage": typed.stage, **(typed.ds_config.get("zero_optimization") or {})} if arm.is_own else {"stage": 0}
    return Arm({"zero_optimization": zero, **arm.knobs})
