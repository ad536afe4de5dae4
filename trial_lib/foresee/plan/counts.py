"""The best arm on other numbers of the same devices, and the fewest on which the program trains at all. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trial_lib.foresee.plan.arm_runs import ArmRuns
from trial_lib.foresee.plan.asked_devices import AskedDevices
from trial_lib.foresee.plan.evaluation import SAFE, Evaluation
from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedCount
from trial_lib.foresee.time.devices import Cluster
from trial_lib.search.arm_priors import prior_costs
from trial_lib.space.knobs import Arm

MOST = 1024
# Of the arms that fit, this many of the cheapest by rule are timed. The others cost more in every foreseen table.
_TIMED_ARMS = 3


def counted(
    asked: AskedDevices,
    arms: Sequence[ArmRuns],
    evaluation: Callable[[ArmRuns, AskedDevices], Evaluation | None],
    check: Callable[[], None] = lambda: None,
) -> tuple[PlannedCount, ...]:
    """Returns the best arm on 1, 2, 4 and up to `MOST` of some devices.

    Args:
        asked: the devices. Their own number is among those returned.
        arms: the foreseen arms.
        evaluation: of an arm on devices; None if model or batch cannot be divided over them.
        check: called between numbers. Its error ends the work.
    """
    found = []
    for devices in _numbers(asked):
        check()
        evaluations = [each for runs in arms if not runs.stopped and (each := evaluation(runs, devices)) is not None]
        if evaluations:
            found.append(_best(devices.count, evaluations))
    return tuple(found)


def fewest(counts: Sequence[PlannedCount]) -> int | None:
    """Returns the smallest number of devices on which an arm fits; None if there is none."""
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


def _best(count: int, evaluations: Sequence[Evaluation]) -> PlannedCount:
    fitting = [each for each in evaluations if each.largest]
    if not fitting:
        forecasts = [
            each.memory.at(each.sizes[0] if each.sizes else each.runs.small.micro_batch) for each in evaluations
        ]
        least = min(forecasts, key=lambda forecast: forecast.needed.mean)
        return PlannedCount(devices=count, peak=ForeseenRange.of(least.needed))
    costs = dict(zip(range(len(fitting)), prior_costs([_as_arm(each) for each in fitting]), strict=True))
    cheapest = [fitting[index] for index in sorted(costs, key=costs.__getitem__)[:_TIMED_ARMS]]
    rows = [(each, *each.best) for each in cheapest]
    safe = [row for row in rows if row[0].fits(row[1]) >= SAFE] or rows
    evaluation, size, step = max(safe, key=lambda row: row[2].samples_per_s if row[2] is not None else 0.0)
    assert step is not None
    wide = step.high / step.seconds
    return PlannedCount(
        devices=count,
        label=evaluation.runs.arm.label,
        micro_batch=size,
        accumulation=max(1, evaluation.policy.accumulation(size)),
        fits=evaluation.fits(size),
        samples_per_s=ForeseenRange(
            value=step.samples_per_s,
            low=step.samples_per_s / wide,
            high=step.samples_per_s * step.seconds / step.low,
        ),
        peak=ForeseenRange.of(evaluation.memory.at(size).needed),
    )


def _as_arm(evaluation: Evaluation) -> Arm:
    """Returns the arm as the search knows it, also for the user's own, whose knobs are empty."""
    run, arm = evaluation.runs.small, evaluation.runs.arm
    return Arm({**arm.knobs, "zero_optimization": {**run.ds_config.get("zero_optimization", {}), "stage": run.stage}})
