"""A plan's runs, in parallel, and the table for each kind of device."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from trial_lib.foresee.plan.answer import answer_of, why_of
from trial_lib.foresee.plan.arm_runs import ArmRuns
from trial_lib.foresee.plan.arms import PlanArm, batch_policy, planned_arms, ranks_of_a_replica
from trial_lib.foresee.plan.asked_devices import AskedDevices
from trial_lib.foresee.plan.counts import counted, fewest
from trial_lib.foresee.plan.evaluation import Evaluation, best_arm, host_room, in_order
from trial_lib.foresee.plan.plan_record import PlannedArm, PlannedDevices
from trial_lib.foresee.time.efficiencies import Efficiencies
from trial_lib.search.arm_priors import prior_costs
from trial_lib.search.batch_policy import BatchPolicy
from trial_lib.space.arms import RequestedKnob
from trial_lib.space.knobs import ZERO_STAGES, Arm
from trial_lib.wire.errors import InputError
from trial_lib.wire.foreseen_run import ForeseenRun

_POLL_S, _WORD_S = 0.1, 4.0


@dataclass(frozen=True, kw_only=True)
class WantedRun:
    """A run to foresee.

    Attributes:
        name: unique in the plan, such as `z3-mbs1-of8`.
        overrides: what it changes in the DeepSpeed configuration; empty for the program as typed.
        is_first: whether it is the first, which finds out what the program is.
        asked: devices that it finds, one of which is its rank's.
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    is_first: bool = False
    asked: AskedDevices


Foresee = Callable[[WantedRun], ForeseenRun]
"""Foresees a run. It is called from several threads at once."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """What to plan.

    Attributes:
        asked: the devices, in the order of `--on`.
        base_config: the user's DeepSpeed configuration as they wrote it; empty if it is in the code.
        typed_overrides: what the first run changes in it, so that it goes on so many ranks.
        stages: ZeRO stages that may be used.
        requests: the `search_space` of the experiment.
        device: `cuda` or `cpu`.
        train_batch_size: as `PlanArguments` has it.
        free_batch: as `PlanArguments` has it.
        max_micro_batch: as `PlanArguments` has it.
        headroom: the share of a device's memory that stays free.
        processes: runs at once.
        efficiencies: constants of the foreseen time; None for the defaults.
    """

    asked: tuple[AskedDevices, ...]
    base_config: Mapping[str, Any]
    typed_overrides: Mapping[str, Any] = field(default_factory=dict)
    stages: Sequence[int] = ZERO_STAGES
    requests: Sequence[RequestedKnob] = ()
    device: str = "cuda"
    train_batch_size: int | None = None
    free_batch: bool = False
    max_micro_batch: int | None = None
    headroom: float = 0.0
    processes: int = 1
    efficiencies: Efficiencies | None = None

    def policy(self, typed: ForeseenRun, count: int) -> BatchPolicy:
        """Returns the batches on a number of devices.

        Raises:
            InputError: none can be divided over them.
        """
        per_replica = max(ranks_of_a_replica(self.base_config), typed.world // max(1, typed.replicas))
        if count % per_replica:
            raise InputError(
                f"{count} devices cannot be divided into groups of {per_replica}, which hold one replica of the model.",
                where="--on",
                remedy=f"Ask for a multiple of {per_replica} devices.",
            )
        return batch_policy(
            typed,
            self.base_config,
            count // per_replica,
            train_batch_size=self.train_batch_size,
            free_batch=self.free_batch,
            max_micro_batch=self.max_micro_batch,
        )


@dataclass(frozen=True)
class Planned:
    """What a planning has found.

    Attributes:
        typed: the run of the program as typed.
        base_config: the user's DeepSpeed configuration.
        policies: the batches by number of devices.
        devices: the tables, in the order of `--on`.
        runs: all runs by name.
        shares: seconds of each part of the planning.
    """

    typed: ForeseenRun
    base_config: Mapping[str, Any]
    policies: Mapping[int, BatchPolicy]
    devices: tuple[PlannedDevices, ...]
    runs: Mapping[str, ForeseenRun]
    shares: Mapping[str, float]


def plan(
    problem: PlanProblem,
    foresee: Foresee,
    tell: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
) -> Planned:
    """Foresees all arms and returns their tables.

    Args:
        problem: what to plan.
        foresee: foresees one run.
        tell: called with a sentence every few seconds.
        check: called often. Its error ends the planning.
        stop: ends the runs that are under way, because the planning has ended.

    Raises:
        ProgramNotForeseenError: the program cannot be foreseen.
        InputError: its batch cannot be divided over the devices.
    """
    watch, said = _Watch(), _Progress(tell)
    base = max(problem.asked, key=lambda each: each.count)
    typed_run = WantedRun(name=f"as-typed-of{base.count}", overrides=problem.typed_overrides, is_first=True, asked=base)
    runs = _all([typed_run], foresee, 1, said, check, stop)
    typed = runs[typed_run.name]
    watch.lap("program as typed")
    if typed.stopped:
        raise ProgramNotForeseenError(f"{typed.stopped} {_INSTEAD}")
    if not problem.base_config:
        problem = replace(problem, base_config=typed.program.get("ds_config") or typed.ds_config)
    policies = {each.count: problem.policy(typed, each.count) for each in problem.asked}
    arms = planned_arms(typed, problem.base_config, problem.stages, problem.requests, problem.device)
    wanted = _wanted(arms, problem, typed, policies)
    runs |= _all(list(wanted.values()), foresee, problem.processes, said, check, stop)
    watch.lap("arms")
    foreseen = [_of_arm(arm, base, runs) for arm in arms]
    devices = tuple(_table(problem, asked, foreseen, policies[asked.count], typed, check) for asked in problem.asked)
    watch.lap("memory and time")
    return Planned(typed, problem.base_config, policies, devices, runs, watch.shares)


class ProgramNotForeseenError(Exception):
    """The program cannot be foreseen. The message says why, with the line if it is known, and what to do instead."""


_INSTEAD = "`zerotune estimate` has formulas and needs no foreseen run. A profile trial on this host replaces it."


def _wanted(
    arms: Sequence[PlanArm], problem: PlanProblem, typed: ForeseenRun, policies: Mapping[int, BatchPolicy]
) -> dict[str, WantedRun]:
    """Returns the runs of all arms by name: at two sizes, and on another number of devices. Likely arms come first."""
    base = max(problem.asked, key=lambda each: each.count)
    others = [each for each in problem.asked if 1 < each.count != base.count]
    policy = policies[base.count]
    small, *larger = policy.sizes()[:2]
    by_cost = sorted(zip(prior_costs([_as_arm(arm, typed) for arm in arms]), range(len(arms)), strict=True))
    ordered = [arms[index] for _, index in by_cost]
    wanted = [_run(arm, base, policy, small) for arm in ordered]
    for size in larger:
        wanted += [_run(arm, base, policy, size) for arm in ordered]
    if others and small in policies[others[0].count].sizes():
        wanted += [_run(arm, others[0], policies[others[0].count], small) for arm in ordered]
    return {run.name: run for run in wanted}


def _run(arm: PlanArm, asked: AskedDevices, policy: BatchPolicy, size: int) -> WantedRun:
    candidate = arm.candidate(policy, size, asked.count)
    # Two micro-batches show all that more of them would: gradients that are kept, and reductions that are left out.
    few = candidate.model_copy(update={"gradient_accumulation_steps": min(2, candidate.gradient_accumulation_steps)})
    return WantedRun(name=run_name(arm.label, size, asked.count), overrides=few.overrides, asked=asked)


def run_name(label: str, micro_batch: int, ranks: int) -> str:
    """Returns the name of a run's file."""
    return f"{label}-mbs{micro_batch}-of{ranks}"


def _of_arm(arm: PlanArm, base: AskedDevices, runs: Mapping[str, ForeseenRun]) -> ArmRuns:
    """Returns the runs of an arm, which are those of its label."""
    mine = {name: run for name, run in runs.items() if name.rpartition("-mbs")[0] == arm.label}
    here = sorted(
        ((run.micro_batch, name) for name, run in mine.items() if name.endswith(f"-of{base.count}")), key=lambda e: e[0]
    )
    names = [name for _, name in here]
    small = mine[names[0]]
    large = mine[names[1]] if len(names) > 1 else None
    wider = next((run for name, run in mine.items() if name not in names), None)
    return ArmRuns(arm, small, large, wider, tuple(names))


def _as_arm(arm: PlanArm, typed: ForeseenRun) -> Arm:
    zero = typed.ds_config.get("zero_optimization") if arm.is_own else None
    return Arm({**arm.knobs, "zero_optimization": zero}) if zero and "stage" in zero else _staged(arm)


def _staged(arm: PlanArm) -> Arm:
    return Arm({"zero_optimization": {"stage": 0}, **arm.knobs})


def _table(
    problem: PlanProblem,
    asked: AskedDevices,
    foreseen: Sequence[ArmRuns],
    policy: BatchPolicy,
    typed: ForeseenRun,
    check: Callable[[], None],
) -> PlannedDevices:
    rows: list[PlannedArm] = []
    judged: list[Evaluation] = []
    for runs in foreseen:
        check()
        evaluation = Evaluation(
            runs=runs,
            asked=asked,
            policy=policy,
            headroom=problem.headroom,
            base_config=dict(problem.base_config),
            efficiencies=problem.efficiencies,
        )
        rows.append(evaluation.planned())
        judged += [] if runs.stopped else [evaluation]
    arms = in_order(rows)
    counts = counted(judged, lambda count: problem.policy(typed, count), check)
    device = asked.cluster.device
    found = PlannedDevices(
        device=device.name,
        nodes=asked.cluster.hosts,
        per_node=asked.cluster.per_host,
        price=asked.price,
        memory=device.memory,
        usable=device.memory * (1 - problem.headroom),
        host_memory=host_room(asked),
        arms=arms,
        best=best_arm(arms),
        counts=counts,
        fewest=fewest(counts),
        notes=() if policy.train_batch_size is None else (_of_batch(policy, asked),),
    )
    return found.model_copy(update={"answer": answer_of(found), "why": why_of(found)})


def _of_batch(policy: BatchPolicy, asked: AskedDevices) -> str:
    assert policy.train_batch_size is not None
    each = policy.train_batch_size / asked.count
    return f"Every arm keeps a global batch of {policy.train_batch_size:,} samples, which is {each:g} for each device."


def _all(
    wanted: Sequence[WantedRun],
    foresee: Foresee,
    processes: int,
    said: "_Progress",
    check: Callable[[], None],
    stop: Callable[[], None],
) -> dict[str, ForeseenRun]:
    """Foresees runs, so many at once. The first error ends all."""
    ended = threading.Event()

    def one(run: WantedRun) -> ForeseenRun:
        if ended.is_set():
            raise InterruptedError
        return foresee(run)

    found: dict[str, ForeseenRun] = {}
    with ThreadPoolExecutor(max_workers=max(1, processes), thread_name_prefix="foresee") as pool:
        waiting: dict[Future[ForeseenRun], WantedRun] = {pool.submit(one, run): run for run in wanted}
        said.begin(len(waiting))
        try:
            while waiting:
                check()
                done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    run = waiting.pop(future)
                    found[run.name] = future.result()
                    said.one(run, found[run.name])
                said.still([run.name for future, run in waiting.items() if future.running()])
        except BaseException:
            ended.set()
            for future in waiting:
                future.cancel()
            # The pool waits for the runs that are under way.
            stop()
            raise
    return found


class _Progress:
    """Says how far the runs are, and that they go on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._total = self._done = 0
        self._begun_at = self._said_at = time.monotonic()

    def begin(self, total: int) -> None:
        self._total, self._done = total, 0
        self._said_at = time.monotonic()

    def one(self, run: WantedRun, found: ForeseenRun) -> None:
        self._done += 1
        of = f" ({self._done} of {self._total})" if self._total > 1 else ""
        if found.stopped:
            self._say(f"{run.name} cannot be foreseen{of}: {found.stopped}")
        else:
            self._say(f"foreseen: {run.name}, {found.seconds:.1f} s{of}")

    def still(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        if names and now - self._said_at > _WORD_S:
            self._say(f"still foreseeing {', '.join(names)} ({now - self._begun_at:.0f} s since the beginning)")

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._tell(text)


class _Watch:
    """Measures the parts of a planning."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.shares[name], self._at = now - self._at, now
