"""The best arm on other numbers of the same devices, and the fewest on which the program trains at all. Pure.

Each arm has a full evaluation on the asked devices. Another number of devices changes its share of the partitioned
states, its accumulation, and the groups of its transfers. Everything else stays.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

from trial_lib.messages.errors import InputError
from trial_lib.plan.asked_devices import AskedDevices
from trial_lib.plan.devices import Cluster
from trial_lib.plan.evaluation import SAFE, Evaluation, fastest_of_pipeline, host_likelihood
from trial_lib.plan.fits import PeakForecast, outside_pytorch
from trial_lib.plan.plan_record import LIKELY, ForeseenRange, PlannedArm, PlannedCount
from trial_lib.plan.step_time import ForeseenStep, foresee_step
from trial_lib.search.budgets import Uncertain
from trial_lib.search.cost_model import prior_costs
from trial_lib.search.knobs import Arm
from trial_lib.search.sizes import BatchPolicy

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
            found.append(_best(known))
            continue
        known = _arms_on(evaluations, devices, partial(policy_on, devices.count, size))
        if known:
            policy, first = known[0].policy, known[0].sizes[0]
            samples = first * max(1, policy.accumulation(first)) * policy.data_parallel_size
            found.append(_best(known).model_copy(update={"other_batch": samples}))
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
    return [arm for each in evaluations if (arm := _AtCount(each, devices, policy)).sizes]


def with_answer(
    counts: Sequence[PlannedCount], devices: int, answer: PlannedArm | None, nearest: PlannedArm | None
) -> tuple[PlannedCount, ...]:
    """The best arms of all numbers, where the asked number has the answer of its table.

    `answer` is None if no arm fits, and `nearest`, the arm that is nearest to fit, if none was foreseen.
    """
    shown = answer or nearest
    if shown is None or shown.peak is None:
        return tuple(counts)
    own = PlannedCount(devices=devices, peak=shown.peak)
    if answer is not None:
        own = PlannedCount(
            devices=devices,
            label=answer.label,
            micro_batch=answer.micro_batch,
            accumulation=answer.accumulation,
            fits=answer.fits,
            samples_per_s=answer.samples_per_s,
            peak=answer.peak,
        )
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


@dataclass(frozen=True)
class _AtCount:
    base: Evaluation  # the arm on the asked devices
    devices: AskedDevices  # the number
    policy: BatchPolicy  # its batches there

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.base.sizes_of(self.policy)

    def forecast(self, size: int) -> PeakForecast:
        before, cluster = self.base.asked, self.devices.cluster
        found = self.base.memory.at(size)
        moved = self._more(self.base.runs.partitioned[0])
        moved += outside_pytorch(self.devices.count, cluster.per_host).mean
        moved -= outside_pytorch(before.count, before.cluster.per_host).mean
        needed, shown = (Uncertain(max(0.0, each.mean + moved), each.deviation) for each in (found.needed, found.shown))
        return replace(found, needed=needed, shown=shown)

    def peak(self, size: int) -> ForeseenRange:
        return ForeseenRange.of_peak(self.forecast(size), self.base.capacity)

    def fits(self, size: int) -> float:
        needed = self.forecast(size).needed
        on_host = self.base.on_host.held + self._more(self.base.runs.partitioned[1])
        on_device = NormalDist(needed.mean, max(1.0, needed.deviation)).cdf(self.base.capacity)
        return on_device * host_likelihood(max(on_host, self.base.on_host.built), self.devices)

    def largest(self, likely: float) -> int:
        """The largest size that fits with a probability; 0 if none does."""
        sizes = self.sizes
        fitting = bisect_left(sizes, True, key=lambda size: self.fits(size) < likely)
        return sizes[fitting - 1] if fitting else 0

    def step(self, size: int) -> ForeseenStep:
        accumulation = max(1, self.policy.accumulation(size))
        run = self.base.runs.step_at(self.policy.data_parallel_size, size, accumulation)
        return foresee_step(run, self.devices.cluster, self.base.efficiencies)

    def fastest(self, largest: int) -> tuple[int, ForeseenStep]:
        if self.base.runs.small.is_pipeline:
            return fastest_of_pipeline([size for size in self.sizes if size <= largest], self.step)
        return largest, self.step(largest)

    def _more(self, share: float) -> float:
        # The bytes by which this rank's share differs from that on the asked devices.
        whole = share * self.base.runs.small.replicas
        return whole / self.policy.data_parallel_size - whole / self.base.policy.data_parallel_size


def _best(arms: Sequence[_AtCount]) -> PlannedCount:
    count = arms[0].devices.count
    fitting = [(arm, size) for arm in arms if (size := arm.largest(SAFE) or arm.largest(LIKELY))]
    if not fitting:
        least = min((arm.peak(size) for arm in arms for size in arm.sizes[:1]), key=lambda peak: peak.value)
        return PlannedCount(devices=count, peak=least)
    costs = prior_costs([_as_arm(arm.base) for arm, _ in fitting])
    cheapest = [fitting[index] for index in sorted(range(len(fitting)), key=costs.__getitem__)[:_TIMED_ARMS]]
    steps = [(arm, *arm.fastest(size)) for arm, size in cheapest]
    safe = [row for row in steps if row[0].fits(row[1]) >= SAFE] or steps
    arm, size, step = max(safe, key=lambda row: row[2].samples_per_s)
    return PlannedCount(
        devices=count,
        label=arm.base.runs.arm.label,
        micro_batch=size,
        accumulation=max(1, arm.policy.accumulation(size)),
        fits=arm.fits(size),
        samples_per_s=ForeseenRange(
            value=step.samples_per_s,
            low=step.samples_per_s * step.seconds / step.high,
            high=step.samples_per_s * step.seconds / step.low,
        ),
        peak=arm.peak(size),
    )


def _as_arm(evaluation: Evaluation) -> Arm:
    run, arm = evaluation.runs.small, evaluation.runs.arm
    return Arm({**arm.knobs, "zero_optimization": {**run.ds_config.get("zero_optimization", {}), "stage": run.stage}})
