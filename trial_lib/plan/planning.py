"""A plan's runs, in parallel, and the table for each kind of device."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import ranks_of_a_replica
from zerotune.trial_lib.deepspeed_config.refusals import is_of_replicas
from zerotune.trial_lib.messages.errors import InputError, ProgramNotForeseenError
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import answer_of, nearest_to_fit, why_of
from zerotune.trial_lib.plan.arm_work import (
    ArmWork,
    WantedRun,
    hopeless_arms,
    hopeless_row,
    pair_of,
    run_name,
    wanted_run,
)
from zerotune.trial_lib.plan.arms import (
    PlanArm,
    SwitchValues,
    batch_policy,
    own_label,
    planned_arms,
    requests_without_arms,
    stated_run,
    typed_overrides,
)
from zerotune.trial_lib.plan.device_memory import AllocatorSettings
from zerotune.trial_lib.plan.devices import AskedDevices, ran_as
from zerotune.trial_lib.plan.evaluation import (
    Evaluation,
    best_arm,
    contradiction_of,
    counted,
    fewest,
    host_room,
    in_order,
    largest,
    unlike_measured,
    with_answer,
)
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices
from zerotune.trial_lib.plan.scaling import ArmRuns, with_common_loading
from zerotune.trial_lib.plan.whole_training import is_same_training
from zerotune.trial_lib.records.switches import PROGRAM, own_switches, switch_key
from zerotune.trial_lib.search.arms import RequestedKnob
from zerotune.trial_lib.search.knobs import ZERO_STAGES
from zerotune.trial_lib.search.sizes import BatchPolicy

_WORD_S = 4.0  # between two sentences on how far a plan is


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Keeps Python's collector of cycles from looking at the millions of records of a plan's runs again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PlanProgress:
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
        if found.stopped and (run.is_first or run.is_ahead):
            # The plan ends with the sentence of the first run. Without one the run ahead is repeated.
            return
        if found.stopped:
            self._say(f"{run.name} cannot be foreseen{of}: {found.stopped}")
        else:
            self._say(f"foreseen: {run.name}, {found.seconds:.1f} s{of}")

    def still(self, names: Sequence[str]) -> None:
        now = time.monotonic()
        if names and now - self._said_at > _WORD_S:
            self._say(f"still foreseeing {', '.join(names)} ({now - self._begun_at:.0f} s since the beginning)")

    def while_working(self, what: str, check: Callable[[], None]) -> Callable[[], None]:
        """Says what begins, and returns a `check` that also says from time to time that it goes on."""
        self._say(what)

        def checked() -> None:
            check()
            now = time.monotonic()
            if now - self._said_at > _WORD_S:
                self._say(f"still {what} ({now - self._begun_at:.0f} s since the beginning)")

        return checked

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._tell(text)


_POLL_S = 0.1
_LONG_S = 3.0  # of a run without its imports
_ALIKE = 1.05  # lengths that differ less are told as one

Foresee = Callable[[WantedRun], ForeseenRun]
"""Foresees a run. It is called from several threads at once."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    asked: tuple[AskedDevices, ...]  # the devices, in the order of `--on`
    base_config: Mapping[str, Any]  # the user's DeepSpeed configuration as they wrote it; empty if it is in the code
    stages: Sequence[int] = ZERO_STAGES  # ZeRO stages that may be used
    requests: Sequence[RequestedKnob] = ()  # the `search_space` of the experiment
    device: str = "cuda"  # `cuda` or `cpu`
    train_batch_size: int | None = None  # as `PlanArguments` has it
    free_batch: bool = False  # as `PlanArguments` has it
    max_micro_batch: int | None = None  # as `PlanArguments` has it
    headroom: float = 0.0  # the share of a device's memory that stays free
    processes: int = 1  # runs at once
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)  # settings of PyTorch's allocator
    # The varied switches in the command as typed, by their places
    switches: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> AskedDevices:
        """The largest number of devices, on which the program runs."""
        return max(self.asked, key=lambda each: each.count)

    @property
    def typed_overrides(self) -> dict[str, Any]:
        """What the first run changes in the user's configuration, so that it goes on so many ranks."""
        return typed_overrides(self.base_config, self.base.count)

    def stated_batch(self, count: int) -> tuple[BatchPolicy, int] | None:
        """The batches and the user's micro-batch on some devices; None if only the program knows them."""
        typed = stated_run({**self.base_config, **self.typed_overrides}, count)
        if typed is None:
            return None
        try:
            policy = self.policy(typed, count)
        except InputError:
            return None
        return (policy, typed.micro_batch) if typed.micro_batch in policy.sizes() else None

    def policy(self, typed: ForeseenRun, count: int, grows_by: int | None = None) -> BatchPolicy:
        """`grows_by` is as `batch_policy` has it. Raises InputError if none can be divided over them."""
        return batch_policy(
            typed,
            self.base_config,
            self._replicas(typed, count),
            train_batch_size=self.train_batch_size,
            free_batch=self.free_batch,
            max_micro_batch=self.max_micro_batch,
            grows_by=grows_by,
        )

    def _replicas(self, typed: ForeseenRun, count: int) -> int:
        per_replica = max(ranks_of_a_replica(self.base_config), typed.world // max(1, typed.replicas))
        if count % per_replica:
            raise InputError(
                f"{count} devices cannot be divided into groups of {per_replica}, which hold one replica of the model.",
                where="--on",
                remedy=f"Ask for a multiple of {per_replica} devices.",
            )
        return count // per_replica


@dataclass(frozen=True)
class Planned:
    typed: ForeseenRun  # the run of the program as typed
    base_config: Mapping[str, Any]  # the user's DeepSpeed configuration
    policies: Mapping[int, BatchPolicy]  # the batches by number of devices
    devices: tuple[PlannedDevices, ...]  # the tables, in the order of `--on`
    runs: Mapping[str, ForeseenRun]  # all runs by name
    shares: Mapping[str, float]  # seconds of each part of the planning
    notes: tuple[str, ...] = ()  # sentences on the program's switches


@paused_collector()
def plan(
    problem: PlanProblem,
    foresee: Foresee,
    tell: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
    end: Callable[[str], None] = lambda name: None,
) -> Planned:
    """Foresees all arms and returns their tables.

    `tell` is called with a sentence every few seconds. `check` is called often, and its error ends the planning. `stop`
    ends the runs that are under way then, and `end` one that is of no use. Raises ProgramNotForeseenError if the
    program cannot be foreseen, and InputError if its batch cannot be divided over the devices.
    """
    said, begun_at = PlanProgress(tell), time.monotonic()
    shares: dict[str, float] = {}

    def foresee_all(wanted: Sequence[WantedRun]) -> Mapping[str, ForeseenRun]:
        return _all(wanted, foresee, problem.processes, said, check, stop, end)

    def end_part(name: str) -> None:
        shares[name] = time.monotonic() - begun_at - sum(shares.values())

    # The first run finds out what the program is.
    base = problem.base
    typed, runs = _first(problem, base, foresee_all)
    end_part("the program")
    if not problem.base_config:
        problem = replace(problem, base_config=typed.program.get("ds_config") or typed.ds_config)
    policies = {each.count: problem.policy(typed, each.count) for each in problem.asked}

    def run_all(wanted: Sequence[WantedRun]) -> None:
        missing = [each for each in wanted if each.name not in runs]
        runs.update(foresee_all(missing) if missing else {})

    # The program's switches, and the arms.
    program = typed.program
    own = own_switches(problem.switches, program.get("switches", {}), program.get("turnable", {}))
    policy = policies[base.count]
    size = pair_of(policy, typed.micro_batch)[0]
    stages = typed.pipeline_stages
    of_own = PlanArm(own_label(problem.base_config), {}, is_own=True)
    switches = SwitchValues(problem.requests, own, of_own, lambda arm: run_name(arm.label, size, base.count))
    run_all([wanted_run(arm, base, policy, size, stages) for arm in switches.arms])
    requests, notes = switches.apart(runs)
    space = typed, {**problem.base_config, PROGRAM: own}, problem.stages, requests, problem.device
    arms, notes = planned_arms(*space), (*notes, *requests_without_arms(*space))
    every, resizing = (*problem.asked, *map(largest, problem.asked)), switches.resizing(runs)
    hopeless = hopeless_arms(arms, typed, every, problem.headroom, resizing) if _takes_long(typed) else ()
    work = ArmWork([arm for arm in arms if arm not in hopeless], base, policies, typed)
    work.also_on(problem.asked)

    # A slow plan runs the user's own pair in any case. With the others, so that no core waits for its last run.
    run_all([*(work.own_larger if _takes_long(typed) else []), *work.small])
    run_all(work.more(runs, problem.processes))
    while unlike := work.unlike(runs):
        run_all(unlike)
    end_part("arms")

    # The tables.
    foreseen = with_common_loading(work.foreseen(runs))
    devices = tuple(
        _table(
            problem,
            asked,
            foreseen,
            hopeless,
            policies[asked.count],
            typed,
            work.ignores_size(runs),
            said.while_working(f"working out memory and time on {asked.cluster}", check),
        )
        for asked in problem.asked
    )
    end_part("memory and time")
    notes = (*ran_as(problem.asked, base), *notes, *_of_lengths(typed, foreseen))
    return Planned(typed, problem.base_config, policies, devices, runs, shares, notes)


def _of_lengths(typed: ForeseenRun, arms: Sequence[ArmRuns]) -> list[str]:
    """Returns a sentence if samples of other lengths were in other runs, which their memory and time follow.

    Only runs with the same switches are compared, because a switch may set the length.
    """
    own = next((switch_key(arm.arm.knobs) for arm in arms if arm.arm.is_own), ())
    alike = {own: [typed]}
    for arm in arms:
        alike.setdefault(switch_key(arm.arm.knobs), []).extend(arm.runs)
    tokens = [[run.tokens for run in runs if run.tokens and not run.stopped] for runs in alike.values()]
    shortest, longest = max(
        ((min(each), max(each)) for each in tokens if each), key=lambda ends: ends[1] / ends[0], default=(1, 1)
    )
    if longest <= _ALIKE * shortest:
        return []
    return [
        f"Samples differ in length: those of the foreseen batches have {shortest:,} to {longest:,} tokens. "
        "A batch of the longest samples needs more memory and time."
    ]


def _first(
    problem: PlanProblem, base: AskedDevices, run: Callable[[Sequence[WantedRun]], Mapping[str, ForeseenRun]]
) -> tuple[ForeseenRun, dict[str, ForeseenRun]]:
    """The first run, with the user's own accumulation, and by name. It finds out what the program is.

    If the configuration states the batch, the first run is one of the user's arm. The other run of its pair, which
    every plan has, goes on beside it.
    """
    stated, accumulation = problem.stated_batch(base.count), None
    ahead: list[WantedRun] = []
    if stated is None:
        wanted = WantedRun(name=f"as-typed-of{base.count}", overrides=problem.typed_overrides, asked=base)
    else:
        policy, size = stated
        accumulation = policy.accumulation(size)
        own = PlanArm(own_label(problem.base_config), {}, is_own=True)
        wanted = wanted_run(own, base, policy, size)
        if problem.processes > 1:
            others = (each for each in pair_of(policy, size) if each != size)
            ahead = [replace(wanted_run(own, base, policy, each), is_ahead=True) for each in others]
    runs = dict(run([replace(wanted, is_first=True), *ahead]))
    if wanted.overrides and is_of_replicas(runs[wanted.name].stopped):
        # The code divides the ranks, as a pipeline does into stages. Only an engine shows how.
        wanted, accumulation = WantedRun(name=f"as-typed-of{base.count}", asked=base), None
        runs = dict(run([replace(wanted, is_first=True)]))
    first = runs[wanted.name]
    if first.stopped:
        would_stop_a_trial = first.stopped.partition(":")[0] in _OWN_ERRORS
        raise ProgramNotForeseenError(first.stopped if would_stop_a_trial else f"{first.stopped} {_INSTEAD}")
    # A run that was stopped says so when it is run again.
    use = _is_of_use_beside(first)
    runs = {name: each for name, each in runs.items() if name == wanted.name or (use and not each.stopped)}
    return replace(first, accumulation=accumulation or first.accumulation), runs


def _is_of_use_beside(first: ForeseenRun) -> bool:
    # Whether a run ahead has what the plan needs. It lacks the flags that the first run has found.
    return not first.stopped and not first.program.get("arg_mappings")


def _takes_long(run: ForeseenRun) -> bool:
    return run.seconds - run.import_s > _LONG_S


_INSTEAD = "`zerotune estimate` is left: it runs a profile trial on this host, and has formulas for the rest."


def _table(
    problem: PlanProblem,
    asked: AskedDevices,
    foreseen: Sequence[ArmRuns],
    hopeless: Sequence[PlanArm],
    policy: BatchPolicy,
    typed: ForeseenRun,
    ignores_size: bool,
    check: Callable[[], None],
) -> PlannedDevices:
    rows: list[PlannedArm] = [hopeless_row(arm, typed, asked.count) for arm in hopeless]
    judged: list[tuple[Evaluation, PlannedArm]] = []
    for runs in foreseen:
        check()
        evaluation = Evaluation(
            runs=runs,
            asked=asked,
            policy=policy,
            headroom=problem.headroom,
            base_config=dict(problem.base_config),
            allocator=problem.allocator,
            typed=(typed.micro_batch, typed.accumulation),
        )
        rows.append(evaluation.planned())
        judged += [] if runs.stopped else [(evaluation, rows[-1])]
    contradiction = contradiction_of(judged)
    arms = in_order([arm.without_speed() for arm in rows] if contradiction else rows)
    best = best_arm(arms)
    # Numbers of devices are compared for the training that was typed, if some arm of it was foreseen.
    same = [each for each in judged if is_same_training(each[0].runs.small, typed)] or judged
    labels = {row.label for _, row in same}
    alike = [arm for arm in arms if arm.label in labels]
    counts = counted([each for each, _ in same], lambda count, grows_by: problem.policy(typed, count, grows_by), check)
    answer = next((arm for arm in alike if arm.label == best_arm(alike)), None)
    if not contradiction:
        counts = with_answer(counts, asked.count, answer, nearest_to_fit(alike or arms))
    device, whole = asked.cluster.device, policy.train_batch_size
    found = PlannedDevices(
        device=device.name,
        nodes=asked.cluster.hosts,
        per_node=asked.cluster.per_host,
        figures=asdict(device),
        price=asked.price,
        memory=device.memory,
        usable=device.memory * (1 - problem.headroom),
        host_memory=host_room(asked),
        arms=arms,
        best=best,
        contradiction=contradiction,
        counts=() if contradiction else counts,
        fewest=fewest(counts),
        notes=(
            *(() if whole is None else (_OF_BATCH.format(whole, whole / asked.count),)),
            *((_OF_ONE_SIZE.format(typed.micro_batch),) if ignores_size else ()),
            *unlike_measured(typed, asked),
            *((_WITHOUT_TRANSFERS,) if policy.data_parallel_size == 1 and len(counts) > 1 else ()),
        ),
    )
    return found.model_copy(update={"answer": answer_of(found), "why": why_of(found)})


_OWN_ERRORS = {
    *("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "NameError", "EOFError"),
    *("FileNotFoundError", "NotADirectoryError", "PermissionError"),
}
_OF_ONE_SIZE = (
    "The program's batches stay as they are, whatever micro-batch its configuration has. So every arm is foreseen at "
    "micro-batch {} alone. If an option of the command sets them, name it: "
    "`--map train_micro_batch_size_per_gpu=--batch_size`."
)
_OF_BATCH = "Every arm keeps a global batch of {:,} samples, which is {:g} for each device."
_WITHOUT_TRANSFERS = (
    "More than one replica of the model would exchange gradients, which no run on one shows. Speeds on more devices "
    "are therefore upper bounds. Ask for several devices to have the exchange foreseen."
)


def _all(
    wanted: Sequence[WantedRun],
    foresee: Foresee,
    processes: int,
    said: PlanProgress,
    check: Callable[[], None],
    stop: Callable[[], None],
    end: Callable[[str], None],
) -> dict[str, ForeseenRun]:
    # Foresees runs, so many at once. The first error ends all, and the first run may end those that are ahead.
    ended = threading.Event()

    def one(run: WantedRun) -> ForeseenRun:
        if ended.is_set():
            raise InterruptedError
        return foresee(run)

    found: dict[str, ForeseenRun] = {}
    ends_those_ahead = False
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
                    ends_those_ahead |= run.is_first and not _is_of_use_beside(found[run.name])
                for future, run in list(waiting.items()):
                    if ends_those_ahead and run.is_ahead:
                        # Again and again, because it may be about to start.
                        end(run.name)
                        if future.cancel():
                            del waiting[future]
                said.still([run.name for future, run in waiting.items() if future.running()])
        except BaseException:
            ended.set()
            for future in waiting:
                future.cancel()
            # The pool waits for the runs that are under way.
            stop()
            raise
    return found
