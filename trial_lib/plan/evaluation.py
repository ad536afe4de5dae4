"""One arm on one cluster: whether it fits, its fastest micro-batch, its speed and its price. Pure."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import permutations
from statistics import NormalDist
from typing import Any

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import EQUAL, memory_bound, time_bound
from zerotune.trial_lib.plan.arm_bytes import HostPeak, host_peak
from zerotune.trial_lib.plan.arms import offloaded_sections
from zerotune.trial_lib.plan.device_memory import AllocatorSettings, with_logits
from zerotune.trial_lib.plan.devices import AskedDevices, Cluster, Efficiencies, attention_share
from zerotune.trial_lib.plan.fits import PROGRAM_ERROR, UNLIKE, ArmMemory, PeakForecast, outside_pytorch, unmeasured
from zerotune.trial_lib.plan.plan_record import LIKELY, PlannedArm, PlannedCount, PlannedRange
from zerotune.trial_lib.plan.scaling import ArmRuns
from zerotune.trial_lib.plan.step_time import PlannedStep, planned_step
from zerotune.trial_lib.records.switches import switch_key
from zerotune.trial_lib.records.units import percent
from zerotune.trial_lib.search.budgets import Uncertain
from zerotune.trial_lib.search.cost_model import prior_costs
from zerotune.trial_lib.search.knobs import Arm
from zerotune.trial_lib.search.sizes import BatchPolicy

SAFE = 0.8
"""The answer's micro-batch fits with at least this probability, if any does."""

_BILLION, _HOUR_S = 1e9, 3600.0
# Sizes whose step is timed: the largest that fits, and some of the smaller ones.
_TIMED = 4
# The host's memory is as uncertain as an allocated peak, and the rank's own libraries are not in it.
_HOST_ERROR = 0.05
_LIBRARIES = 3 * 2.0**30


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    runs: ArmRuns  # of the arm
    asked: AskedDevices  # the devices
    policy: BatchPolicy  # its batches there
    headroom: float = 0.0  # the share of a device's memory that stays free
    base_config: dict[str, object] = field(default_factory=dict)  # the user's DeepSpeed configuration
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)  # settings of PyTorch's allocator
    # micro-batch and accumulation of the program as it was typed; None if nobody knows them
    typed: tuple[int, int] | None = None

    @property
    def capacity(self) -> float:
        """Bytes of a device that programs may use."""
        return self.asked.cluster.device.memory * (1 - self.headroom)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batch sizes that could be taken (samples), ascending: those that the runs say something about."""
        sizes = self.policy.sizes()
        return tuple(size for size in sizes if size == self.runs.small.micro_batch or not self.runs.is_of_one_size)

    @cached_property
    def memory(self) -> ArmMemory:
        one, other = self.runs.at_replicas(self.policy.data_parallel_size)
        cluster = self.asked.cluster
        return ArmMemory(
            one=one,
            other=other,
            settings=self.allocator,
            ranks_per_node=cluster.per_host,
            capability=cluster.device.capability,
            program_error=PROGRAM_ERROR * (UNLIKE if unmeasured(one, cluster.device) else 1.0),
        )

    @cached_property
    def on_host(self) -> HostPeak:
        """Of each rank, in its host's memory."""
        return host_peak(self.memory.one)

    @cached_property
    def host_fits(self) -> float:
        """The probability that the host has room for its ranks, while they build their models and later."""
        return host_likelihood(max(self.on_host.held, self.on_host.built), self.asked)

    def forecast(self, micro_batch: int) -> PeakForecast:
        return self.memory.at(micro_batch)

    def peak(self, micro_batch: int) -> PlannedRange:
        return PlannedRange.of_peak(self.forecast(micro_batch), self.capacity)

    def fits(self, micro_batch: int) -> float:
        return self.forecast(micro_batch).fits(self.capacity) * self.host_fits

    @cached_property
    def largest(self) -> int:
        """The largest micro-batch that fits at even odds or better (samples); 0 if none does."""
        return self.largest_at(LIKELY)

    @cached_property
    def best(self) -> tuple[int, PlannedStep | None]:
        if not self.sizes:
            return self.runs.small.micro_batch, None
        limit = self.largest_at(SAFE) or self.largest
        if not limit:
            return self.sizes[0], None
        fitting = [size for size in self.sizes if size <= limit]
        if self.runs.small.is_pipeline:
            return fastest_of_pipeline(fitting, self.step)
        own = self.typed[0] if self.typed else fitting[-1]
        candidates = {*fitting[-1 : -1 - 2 * _TIMED : -2], *({own} & set(fitting))}
        steps = {size: self.step(size) for size in candidates}
        most = max(step.samples_per_s for step in steps.values())
        # Of those as fast the nearest to the typed one: nothing is gained by another.
        equal = [size for size in steps if EQUAL * steps[size].samples_per_s >= most]
        fastest = min(equal, key=lambda size: (abs(math.log(size / own)), -size))
        return fastest, steps[fastest]

    def step(self, micro_batch: int) -> PlannedStep:
        if micro_batch not in self._steps:
            accumulation = max(1, self.policy.accumulation(micro_batch))
            run = self.runs.step_at(self.policy.data_parallel_size, micro_batch, accumulation)
            self._steps[micro_batch] = planned_step(run, self.asked.cluster)
        return self._steps[micro_batch]

    @cached_property
    def _steps(self) -> dict[int, PlannedStep]:
        # Those that were asked for, by micro-batch.
        return {}

    def planned(self) -> PlannedArm:
        arm = self.runs.arm
        if self.runs.stopped:
            return PlannedArm(**self._named, stopped=self.runs.stopped)
        size, step = self.best
        forecast = self.forecast(size)
        accumulation = max(1, self.policy.accumulation(size))
        candidate = arm.candidate(self.policy, size, self.asked.count)
        # The bytes at the peak by kind, with logits apart from other activations.
        highest = forecast.live.highest
        memory = {} if highest is None else with_logits(highest, self.memory.one, forecast.micro_batch)
        memory["overhead"] = max(0.0, forecast.needed.mean - forecast.live.peak)
        return PlannedArm(
            **self._named,
            ds_config=candidate.complete(self.base_config),
            fits=self.fits(size),
            largest_micro_batch=self.largest,
            most_micro_batch=self.sizes[-1] if self.sizes else size,
            micro_batch=size,
            accumulation=accumulation,
            is_typed=arm.is_own and (size, accumulation) == self.typed,
            peak=self.peak(size),
            peak_moment=highest.name if highest else "",
            memory=memory,
            host=self.on_host.held,
            memory_bound=memory_bound(memory),
            # Then the states are divided anew.
            is_scaled=self.policy.data_parallel_size != self.runs.small.replicas,
            runs=self.runs.names,
            speeds={size: self._steps[size].samples_per_s for size in sorted(self._steps)},
            **({} if step is None else self._speed(step)),
        )

    @property
    def _named(self) -> dict[str, Any]:
        arm = self.runs.arm
        return {"label": arm.label, "knobs": dict(arm.knobs), "is_own": arm.is_own, "switches": dict(arm.switches)}

    def _speed(self, step: PlannedStep) -> dict[str, object]:
        def rate(value: float | None) -> PlannedRange | None:
            return None if value is None else PlannedRange.of_rate(value, step)

        without_data = max(step.seconds - step.parts["data"], 1e-9)
        tokens, price = rate(step.tokens_per_s), self.asked.price
        cost = None
        if tokens is not None and price is not None and tokens.value > 0:
            of_hour = price * self.asked.count / _HOUR_S * _BILLION
            cost = PlannedRange(value=of_hour / tokens.value, low=of_hour / tokens.high, high=of_hour / tokens.low)
        return {
            "samples_per_s": rate(step.samples_per_s),
            "tokens_per_s": tokens,
            "mfu": rate(step.mfu),
            "without_loading": step.samples_per_s * step.seconds / without_data if step.parts["data"] else None,
            "cost": cost,
            "apart": step.apart,
            "seconds": dict(step.parts),
            "hidden_s": step.hidden,
            "time_bound": time_bound(step.parts),
        }

    def largest_at(self, likely: float) -> int:
        """The largest of the sizes that fits with a probability; 0 if none does."""
        fitting = bisect_left(self.sizes, True, key=lambda size: self.fits(size) < likely)
        return self.sizes[fitting - 1] if fitting else 0


def unlike_measured(run: ForeseenRun, asked: AskedDevices) -> tuple[str, ...]:
    """The sentence on intervals that are wider, because no measured peak is of such a training; empty for others."""
    unlike = unmeasured(run, asked.cluster.device)
    said = f"No peak of {unlike} is among those that intervals come from, so they are {UNLIKE} times as wide."
    return (said,) if unlike else ()


def fastest_of_pipeline(sizes: Sequence[int], step: Callable[[int], PlannedStep]) -> tuple[int, PlannedStep]:
    """Larger micro-batches of a pipeline compute faster, and leave fewer of them in a step.

    So more of it is spent with filling and draining the pipeline. The speed rises up to one size, and falls from there
    on.
    """

    def speed(size: int) -> float:
        return step(size).samples_per_s

    best = sizes[-1]
    while (halves := [each for each in sizes if 2 * each <= best]) and speed(halves[-1]) >= speed(best):
        best = halves[-1]
    place = sizes.index(best)
    while faster := [
        each for each in (place - 1, place + 1) if 0 <= each < len(sizes) and speed(sizes[each]) > speed(sizes[place])
    ]:
        place = max(faster, key=lambda each: speed(sizes[each]))
    return sizes[place], step(sizes[place])


def contradiction_of(judged: Sequence[tuple[Evaluation, PlannedArm]]) -> str:
    """Why speeds of a table cannot be, in a sentence that names the rows; empty if they may.

    At one micro-batch more communication on a single device is no faster, and neither is an offload. No arm computes
    faster than its kernels do. A speed contradicts that of an arm with less to do only beyond the interval of the
    latter, without what is unknown of both alike. If launching small operations bounds a step, order is chance.
    """
    constants = Efficiencies()
    for arm, row in judged:
        attention = constants.attention.value * attention_share(arm.asked.cluster.device)
        most = max(constants.matmul.value, attention) / constants.whole.value
        if row.mfu is not None and row.mfu.value > EQUAL * min(1.0, most):
            return f"The row {row.label} has an MFU of {percent(round(row.mfu.value, 2))}, which no kernel reaches."
    timed = [each for each in judged if each[1].samples_per_s is not None]
    for (fast, row), (slow, other) in permutations(timed, 2):
        more = _more_to_do(fast, slow)
        if not more or _speed(row) <= _speed(other) or row.micro_batch not in slow.sizes:
            continue
        # They may have other micro-batches in the table.
        theirs = slow.step(row.micro_batch)
        times = fast.step(row.micro_batch).samples_per_s / theirs.samples_per_s
        if times > theirs.apart and theirs.bound != "launches":
            return (
                f"The row {row.label} is {times:.2f} times as fast as {other.label} with the same micro-batch of "
                f"{row.micro_batch}, and {more}."
            )
    return ""


def _more_to_do(one: Evaluation, other: Evaluation) -> str:
    # What an arm has to do more than another one, which is alike otherwise; empty if nothing is.
    mine, its = one.runs.small, other.runs.small
    if switch_key(one.runs.arm.knobs) != switch_key(other.runs.arm.knobs):
        return ""
    offloads, its_offloads = offloaded_sections(mine.ds_config), offloaded_sections(its.ds_config)
    if mine.stage == its.stage and offloads > its_offloads:
        return "offloads more"
    is_more = one.asked.count == 1 and mine.stage > its.stage and offloads == its_offloads
    return "a higher stage only adds communication on a single device" if is_more else ""


def _speed(row: PlannedArm) -> float:
    return row.samples_per_s.value if row.samples_per_s else 0.0


def host_likelihood(held: float, asked: AskedDevices) -> float:
    return 1.0 if held <= 0 else NormalDist(held, _HOST_ERROR * held).cdf(host_room(asked))


def host_room(asked: AskedDevices) -> float:
    """The bytes of its host's memory that each rank may fill with states."""
    # A rented device comes with its share of the host, also if the others are somebody else's.
    return asked.cluster.device.host_memory - _LIBRARIES


def in_order(arms: Sequence[PlannedArm]) -> tuple[PlannedArm, ...]:
    """Those that fit, fastest first, then the others, nearest to fit first."""

    def key(arm: PlannedArm) -> tuple[int, float, float]:
        if arm.is_likely and arm.samples_per_s is not None:
            return 0, -arm.samples_per_s.value, 0.0
        if arm.stopped or arm.peak is None:
            return 2, 0.0, 0.0
        return 1, -round(arm.fits, 3), arm.peak.value

    return tuple(sorted(arms, key=key))


def best_arm(arms: Sequence[PlannedArm]) -> str:
    """The label of the fastest that surely fits, else of the likeliest; empty if none fits."""
    fitting = [arm for arm in arms if arm.is_likely and arm.samples_per_s is not None]
    safe = [arm for arm in fitting if arm.fits >= SAFE]
    if safe:
        most = max(map(_speed, safe))
        # Of arms as fast the user's own: nothing is gained by another.
        return max(safe, key=lambda arm: (arm.is_own and EQUAL * _speed(arm) >= most, _speed(arm))).label
    return max(fitting, key=lambda arm: arm.fits).label if fitting else ""


# The best arm on other numbers of the same devices, and the fewest on which the program trains at all.
#
# Each arm has a full evaluation on the asked devices. Another number of devices changes its share of the partitioned
# states, its accumulation, and the groups of its transfers. Everything else stays.

MOST = 1024
# Of the arms that fit, this many of the cheapest by rule are timed. The others cost more in every foreseen table.
_TIMED_ARMS = 2


def counted(
    evaluations: Sequence[Evaluation],
    policy_on: Callable[[int, int | None], BatchPolicy],
    check: Callable[[], None] = lambda: None,
) -> tuple[PlannedCount, ...]:
    """The best arm on 1, 2, 4 and up to `MOST` of some devices, and on the asked number.

    A number that cannot divide the kept global batch has the next larger one. Numbers that hold no whole replicas of
    the model are left out. `policy_on` returns the batches on a number of devices. With a size (samples) they are those
    of another global batch, which is a multiple of it. It raises InputError if the batch cannot be divided. `check` is
    called between numbers, and its error ends the work.
    """
    found = []
    # Arms of one size need a batch that has it.
    size = max((each.runs.small.micro_batch for each in evaluations if each.runs.is_of_one_size), default=1)
    for devices in _numbers(evaluations[0].asked) if evaluations else ():
        check()
        known = _arms_on(evaluations, devices, partial(policy_on, devices.count, None))
        if known:
            found.append(_best_count(known))
            continue
        known = _arms_on(evaluations, devices, partial(policy_on, devices.count, size))
        if known:
            policy, first = known[0].policy, known[0].sizes[0]
            samples = first * max(1, policy.accumulation(first)) * policy.data_parallel_size
            found.append(_best_count(known).model_copy(update={"other_batch": samples}))
    return tuple(found)


def largest(asked: AskedDevices) -> AskedDevices:
    """The largest number of some devices that a curve has."""
    return max(_numbers(asked), key=lambda each: each.count)


def _arms_on(
    evaluations: Sequence[Evaluation], devices: AskedDevices, policy_of: Callable[[], BatchPolicy]
) -> "list[_AtCount]":
    try:
        policy = policy_of()
    except InputError:
        return []
    return [arm for each in evaluations if (arm := _AtCount.of(each, devices, policy)).sizes]


def with_answer(
    counts: Sequence[PlannedCount], devices: int, answer: PlannedArm | None, nearest: PlannedArm | None
) -> tuple[PlannedCount, ...]:
    """The best arms of all numbers, where the asked number has the answer of its table.

    `answer` is None if no arm fits, and `nearest`, the arm that is nearest to fit, if none was foreseen.
    """
    shown = answer or nearest
    if shown is None or shown.peak is None:
        return tuple(counts)
    shared = ("label", "micro_batch", "accumulation", "fits", "samples_per_s", "apart") if answer is not None else ()
    own = PlannedCount(devices=devices, peak=shown.peak, **{name: getattr(shown, name) for name in shared})
    return tuple(own if each.devices == devices and not each.other_batch else each for each in counts)


def fewest(counts: Sequence[PlannedCount]) -> int | None:
    """The smallest number of devices on which an arm fits; None if there is none."""
    return min((each.devices for each in counts if each.label), default=None)


def _numbers(asked: AskedDevices) -> Iterator[AskedDevices]:
    device = asked.cluster.device
    powers = (2**power for power in range(MOST.bit_length()))
    for count in sorted({*powers, asked.count}):
        if count == asked.count:
            yield asked
        elif count <= device.per_host or count % device.per_host == 0:
            hosts = max(1, count // device.per_host)
            yield replace(asked, cluster=Cluster(device=device, hosts=hosts, per_host=count // hosts), is_here=False)


@dataclass(frozen=True, kw_only=True)
class _AtCount(Evaluation):
    """An arm on another number of devices, with the batches that it has there."""

    base: Evaluation  # the arm on the asked devices

    @classmethod
    def of(cls, base: Evaluation, devices: AskedDevices, policy: BatchPolicy) -> "_AtCount":
        return cls(runs=base.runs, asked=devices, policy=policy, headroom=base.headroom, base=base)

    def forecast(self, micro_batch: int) -> PeakForecast:
        before, cluster = self.base.asked, self.asked.cluster
        found = self.base.forecast(micro_batch)
        moved = self._more(self.runs.partitioned[0])
        moved += outside_pytorch(self.asked.count, cluster.per_host).mean
        moved -= outside_pytorch(before.count, before.cluster.per_host).mean
        needed, shown = (Uncertain(max(0.0, each.mean + moved), each.deviation) for each in (found.needed, found.shown))
        return replace(found, needed=needed, shown=shown)

    @cached_property
    def host_fits(self) -> float:
        on_host = self.base.on_host
        return host_likelihood(max(on_host.held + self._more(self.runs.partitioned[1]), on_host.built), self.asked)

    def fastest(self, largest: int) -> tuple[int, PlannedStep]:
        if self.runs.small.is_pipeline:
            return fastest_of_pipeline([size for size in self.sizes if size <= largest], self.step)
        return largest, self.step(largest)

    def _more(self, share: float) -> float:
        # The bytes by which this rank's share differs from that on the asked devices.
        whole = share * self.runs.small.replicas
        return whole / self.policy.data_parallel_size - whole / self.base.policy.data_parallel_size


def _best_count(arms: Sequence[_AtCount]) -> PlannedCount:
    count = arms[0].asked.count
    fitting = [(arm, size) for arm in arms if (size := arm.largest_at(SAFE) or arm.largest)]
    if not fitting:
        least = min((arm.peak(size) for arm in arms for size in arm.sizes[:1]), key=lambda peak: peak.value)
        return PlannedCount(devices=count, peak=least)
    costs = prior_costs([_as_arm(arm) for arm, _ in fitting])
    cheapest = [fitting[index] for index in sorted(range(len(fitting)), key=costs.__getitem__)[:_TIMED_ARMS]]
    steps = [(arm, *arm.fastest(size)) for arm, size in cheapest]
    safe = [row for row in steps if row[0].fits(row[1]) >= SAFE] or steps
    arm, size, step = max(safe, key=lambda row: row[2].samples_per_s)
    return PlannedCount(
        devices=count,
        label=arm.runs.arm.label,
        micro_batch=size,
        accumulation=max(1, arm.policy.accumulation(size)),
        fits=arm.fits(size),
        samples_per_s=PlannedRange.of_rate(step.samples_per_s, step),
        apart=step.apart,
        peak=arm.peak(size),
    )


def _as_arm(evaluation: Evaluation) -> Arm:
    run, arm = evaluation.runs.small, evaluation.runs.arm
    return Arm({**arm.knobs, "zero_optimization": {**run.ds_config.get("zero_optimization", {}), "stage": run.stage}})
