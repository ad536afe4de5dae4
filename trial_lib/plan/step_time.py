"""The seconds of an optimizer step on a cluster that is not there. Pure.

The operations of a foreseen run are laid on the clocks of a `Timeline` as DeepSpeed 0.19.8 does: stages 1 and 2 reduce
buckets behind the backward pass if `overlap_comm` is on, stage 3 gathers ahead by the size of its prefetch bucket, an
offloaded optimizer waits for the gradients on the host. The absolute figure is *foreseen* until the device has been
measured; order and fit are what it is for.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.messages.measurement import STEP_PARTS
from zerotune.trial_lib.messages.turned import compiles
from zerotune.trial_lib.plan.devices import (
    COLLECTIVES,
    DISK,
    ON_MATRIX_UNITS,
    Cluster,
    Efficiencies,
    collective_seconds,
    copy_seconds,
    group_of,
    host_seconds,
    kernel_seconds,
    swap_seconds,
)
from zerotune.trial_lib.records.switches import switches_of

# The operations of one optimizer step, cut out of a foreseen run.


@dataclass(frozen=True)
class Stretch:
    moment: str  # a name of `MOMENTS`
    operations: tuple[Operation, ...]  # in order
    micro_batch: int = 0  # of the step, from 0


@dataclass(frozen=True)
class StepWork:
    repeated: tuple[Stretch, ...]  # a micro-batch that stands for several alike
    times: int  # how often it comes
    last: tuple[Stretch, ...]  # what comes after that, with the update


@dataclass(frozen=True)
class ZeroTimes:
    stage: int  # the ZeRO stage
    overlaps: bool  # whether reductions and gathers have a stream of their own
    prefetched: float  # parameters that stage 3 gathers ahead
    pins_optimizer: bool  # whether offloaded states are in locked pages
    pins_params: bool  # likewise for parameters

    @classmethod
    def of(cls, stage: int, ds_config: Mapping[str, Any]) -> "ZeroTimes":
        """Reads a DeepSpeed configuration, with the defaults of `deepspeed/runtime/zero/config.py` (0.19.8)."""
        zero = ds_config.get("zero_optimization") or {}
        overlaps = zero.get("overlap_comm")
        prefetched = zero.get("stage3_prefetch_bucket_size", zero.get("prefetch_bucket_size"))
        optimizer, params = (zero.get(f"offload_{each}") or {} for each in ("optimizer", "param"))
        return cls(
            stage=stage,
            overlaps=stage == 3 if overlaps is None else bool(overlaps),
            prefetched=float(prefetched) if isinstance(prefetched, (int, float)) else 5e7,
            pins_optimizer=bool(optimizer.get("pin_memory", False)),
            pins_params=bool(params.get("pin_memory", False)),
        )


def step_of(run: ForeseenRun) -> StepWork:
    """The last whole step of a run, with all of its micro-batches.

    A run may show fewer micro-batches than a step has. Then its first stands for the missing ones, because the last
    also reduces what earlier ones left. Of three or more it is the second. If the first is the last, it stands for them
    without what stages 0 and 1 reduce at the end of a step. If a run shows too many, the first are left out. Raises
    ValueError if the run has no step.
    """
    whole = {moment.step for moment in run.moments if MOMENTS[moment.name] == "update" and moment.step > 0}
    steps = whole or {moment.step for moment in run.moments if moment.step > 0}
    if not steps:
        raise ValueError("the foreseen run has no optimizer step")
    last = [
        Stretch(MOMENTS[moment.name], operations, moment.micro_batch)
        for moment, operations in run.operations_by_moment()
        if moment.step == max(steps)
    ]
    shown = sorted({each.micro_batch for each in last})
    lacking = run.accumulation - len(shown)
    if lacking <= 0:
        kept = shown[-run.accumulation :]
        return StepWork((), 0, tuple(each for each in last if each.micro_batch in kept))
    # In a pipeline the second also adds to gradients, as all but the first do.
    repeated = shown[1] if len(shown) > 2 else shown[0]
    first = [each for each in last if each.micro_batch == repeated and each.moment != "update"]
    if len(shown) == 1 and run.stage < 2:
        first = [replace(each, operations=_without_reductions(each.operations, run)) for each in first]
    return StepWork(tuple(first), lacking, tuple(last))


def _without_reductions(operations: tuple[Operation, ...], run: ForeseenRun) -> tuple[Operation, ...]:
    kinds = ("all_reduce", "reduce_scatter", "broadcast", "to_host")
    return tuple(
        each for each in operations if kind_of(each) not in kinds or not (each.ranks == 1 or run.shares_states(each))
    )


def loading_seconds(run: ForeseenRun) -> float:
    """The usual seconds to fetch a micro-batch, measured on the host that foresaw."""
    return statistics.median(run.loading_s) if run.loading_s else 0.0


def model_flops(run: ForeseenRun) -> float:
    """The model FLOPs of a step on one rank.

    Activations that are computed a second time do not count. If all is trained, a backward pass has twice the work of
    the forward pass. More than that is taken for such repetition.
    """
    work = dict.fromkeys(("forward", "backward"), 0.0)
    step = step_of(run)
    for stretches, times in ((step.repeated, step.times), (step.last, 1)):
        for stretch in stretches:
            if stretch.moment in work:
                work[stretch.moment] += times * sum(
                    each.flops for each in stretch.operations if kind_of(each) not in ("to_host", "to_device")
                )
    return work["forward"] + min(work["backward"], 2 * work["forward"])


def flops_per_sample(run: ForeseenRun) -> float:
    """The model FLOPs of a run's last forward and backward passes for one sample, on all devices of a replica.

    The same operations count as in a profile trial (`trial_lib/rank/flops.py`).
    """
    passes = {MOMENTS.index(name) for name in ("forward", "backward")}
    last = max((moment.step for moment in run.moments if moment.name in passes), default=0)
    flops = sum(
        sum(each.flops for each in operations if kind_of(each) in ON_MATRIX_UNITS)
        for moment, operations in run.operations_by_moment()
        if moment.step == last and moment.name in passes
    )
    samples = run.micro_batch * run.accumulation
    return flops / samples * run.world / run.replicas if samples and run.replicas else 0.0


def multiplied_in(run: ForeseenRun) -> str | None:
    """The number format of most FLOPs of matrices in a step; None without any, and for 64 bits."""
    flops: dict[int, float] = {}
    for stretch in step_of(run).last:
        for each in stretch.operations:
            if kind_of(each) in ON_MATRIX_UNITS:
                flops[each.dtype] = flops.get(each.dtype, 0.0) + each.flops
    most = run.dtypes[max(flops, key=lambda dtype: flops[dtype])] if flops and run.dtypes else None
    return None if most == "float64" else most


def kind_of(operation: Operation) -> str:
    return OPERATIONS[operation.kind]


# The operations of a compiled model: those that inductor fuses are one pass over the memory.

# Of the classes in `OPERATIONS`. Products, attention and embeddings are kernels of their own.
_FUSIBLE = ("norm", "elementwise", "reduction", "copy", "loss")


def is_compiled(run: ForeseenRun) -> bool:
    """Whether a switch in the configuration of a run compiles the model. The run itself is as written."""
    return compiles(switches_of(run.ds_config))


def fused(run: ForeseenRun) -> ForeseenRun:
    """A run with one operation for all that inductor may fuse. Its storages and events stay.

    At stage 3 DeepSpeed gathers the parameters of each module in hooks, which no kernel crosses.
    """
    operations: list[Operation] = []
    moments: list[Moment] = []
    for moment, stretch in run.operations_by_moment():
        moments.append(moment._replace(operation=len(operations)))
        is_pass = MOMENTS[moment.name] in ("forward", "backward")
        operations += _fused(stretch, run.stage == 3) if is_pass else stretch
    return replace(run, operations=tuple(operations), moments=tuple(moments))


def _fused(stretch: Sequence[Operation], within_modules: bool) -> list[Operation]:
    kernels: list[Operation] = []
    before: Operation | None = None
    for operation in stretch:
        joins = (
            before is not None
            and _is_fusible(before)
            and _is_fusible(operation)
            and (operation.where == before.where or not within_modules)
        )
        if joins:
            last = kernels[-1]
            larger = max(last, operation, key=lambda each: each.moved)
            kernels[-1] = larger._replace(flops=last.flops + operation.flops, where=last.where)
        else:
            kernels.append(operation)
        before = operation
    return kernels


def _is_fusible(operation: Operation) -> bool:
    return kind_of(operation) in _FUSIBLE and not operation.on_host


# The clocks of a step: the host issues, the device computes, links carry.

_OF_TRACES = ("generation", "rewards", "other")
PARTS = ("compute", "launches", *(part for part in STEP_PARTS if part not in ("compute", "launches", *_OF_TRACES)))
"""The parts of a step. Beside `compute` and `update` they are waiting times of the device.

`launches`: for the host to issue the next operation. `gathering`: for parameters. `reducing`: for gradients.
`exchanging`: for activations of tensor, sequence or pipeline parallelism. `host_update`: for the optimizer on the host.
`transfers`: for copies between device and host. `disk`: for states on NVMe. `data`: for the loader.
"""

# DeepSpeed fills a second bucket while the first is reduced, and no third (stage_1_and_2.py, stage3.py in 0.19.8).
_BUCKETS = 2
# The host waits for the fetch before the last two (partitioned_param_coordinator.py).
_FETCHES = 2


@dataclass
class Timeline:
    """The clocks, in seconds since the step began."""

    host: float = 0.0  # when the host can issue the next operation
    device: float = 0.0  # when the device has done all that was issued
    links: float = 0.0  # when the links between devices have
    to_host: float = 0.0  # when copies to the host have
    to_device: float = 0.0  # when copies to the device have
    # When a disk has read and written, by the kind of operation
    disk: dict[str, float] = field(default_factory=lambda: {"from_disk": 0.0, "to_disk": 0.0})
    # Seconds so far, by the names of `PARTS`
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _pauses: deque[tuple[float, float, str]] = field(default_factory=deque)
    _gathers: deque[tuple[float, float]] = field(default_factory=deque)
    _fetches: deque[float] = field(default_factory=deque)
    _ahead: float = 0.0
    _reductions: deque[float] = field(default_factory=deque)

    def pause(self, seconds: float, part: str) -> None:
        if seconds > 0:
            self._pauses.append((self.host, self.host + seconds, part))
            self.host += seconds

    def compute(self, seconds: float, launch: float, part: str) -> None:
        self.host += launch
        if self.host > self.device:
            self._device_waits_for_the_host()
        self.device += seconds
        self.parts[part] += seconds

    def wait(self, until: float, part: str) -> None:
        if until > self.device:
            self._device_waits_for_the_host(until)
            self.parts[part] += max(0.0, until - self.device)
            self.device = max(self.device, until)

    def catch_up(self) -> None:
        """Lets the host wait for the device, as code does that asks for a value."""
        self.host = max(self.host, self.device)

    def carry(self, seconds: float, launch: float, after_device: bool) -> float:
        """Sends over the links, what the device computes if `after_device`, and returns when that ends."""
        self.host += launch
        begin = max(self.links, self.host, self.to_device, self.device if after_device else 0.0)
        self.links = begin + seconds
        return self.links

    def swap(self, kind: str, seconds: float) -> None:
        """Lets a disk read or write. A drive does both at once."""
        begin = max(self.host, self.to_host) if kind == "to_disk" else self.host
        self.disk[kind] = max(self.disk[kind], begin) + seconds

    def swapped(self, kind: str) -> None:
        self.pause(self.disk[kind] - self.host, "disk")

    def gather_ahead(self, end: float, size: float, allowed: float) -> None:
        """Notes parameters that are on their way.

        The order of gathers tells which of them the device needs next. The latest `allowed` bytes are for later.
        """
        self._gathers.append((end, size))
        self._ahead += size
        self._fetches.append(end)
        if len(self._fetches) > _FETCHES:
            self.pause(self._fetches.popleft() - self.host, "gathering")
        while self._gathers and self._ahead - self._gathers[0][1] >= allowed:
            self._wait_for_first_gather()

    def all_gathered(self) -> None:
        while self._gathers:
            self._wait_for_first_gather()

    def reduce_behind(self, end: float) -> None:
        """Notes a bucket that is being reduced. The device waits if there is no bucket left to fill."""
        self._reductions.append(end)
        if len(self._reductions) > _BUCKETS - 1:
            self.wait(self._reductions.popleft(), "reducing")

    def all_reduced(self) -> None:
        self._reductions.clear()
        self.wait(self.links, "reducing")

    def finish(self, part: str) -> float:
        """The seconds of the step. The device waits for all links, under the name of `part`."""
        self.all_gathered()
        self.wait(self.links, part)
        self.wait(max(self.to_host, self.to_device), "transfers")
        for kind in self.disk:
            self.swapped(kind)
        self._device_waits_for_the_host()
        return self.device

    def _wait_for_first_gather(self) -> None:
        end, size = self._gathers.popleft()
        self._ahead -= size
        self.wait(end, "gathering")

    def _device_waits_for_the_host(self, until: float | None = None) -> None:
        end = self.host if until is None else min(self.host, until)
        while self._pauses and self._pauses[0][1] <= self.device:
            self._pauses.popleft()
        if end <= self.device:
            return
        idle = end - self.device
        for begin, stop, part in self._pauses:
            within = min(stop, end) - max(begin, self.device)
            if within > 0:
                self.parts[part] += within
                idle -= within
        self.parts["launches"] += idle
        self.device = end


_QUANTILE_90 = 1.645
# Of 629 launches on public grids whose pipeline or tensor-parallel groups reach over hosts, one in twenty took over so
# many times as long as foreseen (benchmarks/replay/layouts.py, worlds that are not held out).
_SLOWEST_ACROSS_HOSTS = 45.0
# Micro-batches after which the clocks of those alike no longer change to each other.
_ALIKE = 4
# The constant that decides a class of operations; `memory` for others.
_CLASSES = {"matmul": "matmul", "convolution": "matmul", "attention": "attention", "whole_attention": "attention"}
# What the host needs time for.
_ISSUED = ("launch", "collective", "module")
_CARRIED = ("link", "network", "copies", "disk")
_WAITED = ("gathering", "reducing", "exchanging", "transfers", "disk")


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    seconds: float  # of an optimizer step, the median of what is foreseen
    low: float  # the lower end of the 90 % interval
    high: float  # the upper end
    # The ratio of that interval's ends to the median, without what all steps on a device have in common
    # (`Efficiencies.whole`)
    apart: float
    parts: Mapping[str, float]  # seconds by the names of `PARTS`; they add up to `seconds`
    shares: Mapping[str, float]  # of the step that each constant decides, by its name in `Efficiencies`
    hidden: float  # seconds of transfers that go on beside the computation
    bound: str  # the largest part
    samples_per_s: float  # of all replicas
    tokens_per_s: float | None  # likewise; None if the batches show no tokens
    # Model FLOP/s as a share of the peak of the format in which most FLOPs of matrices are; None without any
    mfu: float | None


def planned_step(run: ForeseenRun, cluster: Cluster, efficiencies: Efficiencies | None = None) -> PlannedStep:
    """The step of a run of as many ranks as the cluster has; see `at_world` for another number.

    If a switch in the run's configuration compiles the model, what inductor fuses counts as such. Raises ValueError if
    the run has no step.
    """
    written = _as_written(run, cluster, efficiencies)
    if not is_compiled(run):
        return written
    # More may be read and written than in one pass for each kernel, up to what the written model does.
    return replace(_as_written(fused(run), cluster, efficiencies), high=written.high)


def reaches_over_hosts(run: ForeseenRun, cluster: Cluster) -> bool:
    """Returns whether a pipeline, or a tensor-parallel group, has ranks on several hosts."""
    tensor = run.world // run.zero_ranks // run.pipeline_stages
    return cluster.hosts > 1 and (run.pipeline_stages > 1 or tensor > cluster.per_host)


def _as_written(run: ForeseenRun, cluster: Cluster, efficiencies: Efficiencies | None) -> PlannedStep:
    constants = efficiencies or Efficiencies()
    layer = _Layer(run, cluster, constants)
    timeline, busy = layer.lay(step_of(run))
    if run.loads_beside:
        # Workers go on while the rank trains. It waits for what they take longer.
        loading = loading_seconds(run) * run.accumulation / constants.whole.value
        timeline.parts["data"] += max(0.0, loading - sum(timeline.parts.values()))
    by_stages = layer.waits_for_stages()
    parts = {name: part * constants.whole.value for name, part in timeline.parts.items()}
    parts["exchanging"] += sum(by_stages.values()) * constants.whole.value
    seconds = sum(parts.values())
    # What other stages do meanwhile is decided by the same constants as the rank's own passes.
    shares = _shares({name: part + by_stages.get(name, 0.0) for name, part in timeline.parts.items()}, busy)
    spreads = {name: share * getattr(constants, name).spread for name, share in shares.items()}
    wide = math.exp(_QUANTILE_90 * math.hypot(*spreads.values()))
    spreads.pop("whole", None)
    samples = (run.rows or run.micro_batch) * run.accumulation * run.replicas / seconds
    dtype = multiplied_in(run)
    return PlannedStep(
        seconds=seconds,
        low=seconds / wide,
        high=seconds * max(wide, _SLOWEST_ACROSS_HOSTS if reaches_over_hosts(run, cluster) else 1.0),
        apart=math.exp(_QUANTILE_90 * math.hypot(*spreads.values())),
        parts=parts,
        shares=shares,
        hidden=max(0.0, sum(busy[name] for name in _CARRIED) - sum(timeline.parts[name] for name in _WAITED))
        * constants.whole.value,
        bound=max(parts, key=lambda name: parts[name]),
        samples_per_s=samples,
        tokens_per_s=None if run.tokens is None else samples * run.tokens,
        mfu=model_flops(run) / seconds / cluster.device.peak(dtype) if dtype else None,
    )


class _Layer:
    def __init__(self, run: ForeseenRun, cluster: Cluster, efficiencies: Efficiencies) -> None:
        self._run = run
        self._cluster = cluster
        self._constants = efficiencies
        self._zero = ZeroTimes.of(run.stage, run.ds_config)
        self._loading = loading_seconds(run)
        self._timeline = Timeline()
        self._before = ""
        self._launch = 0.0
        self._entered = 0
        self._passed: dict[str, float] = {}
        # Seconds of links within hosts, of the network and of the device's classes, busy or waited for.
        self._busy = dict.fromkeys(("matmul", "attention", "memory", *_CARRIED, *_ISSUED), 0.0)
        self._prices: dict[tuple[int, int, float, float], float] = {}

    def lay(self, step: StepWork) -> tuple[Timeline, dict[str, float]]:
        timeline = self._timeline
        for _ in range(min(step.times, _ALIKE)):
            parts, busy = dict(timeline.parts), dict(self._busy)
            self._lay(step.repeated)
        if step.times > _ALIKE:
            # From then on each micro-batch adds what the one before it did.
            more = step.times - _ALIKE
            for sums, earlier in ((timeline.parts, parts), (self._busy, busy)):
                sums.update({name: value + more * (value - earlier[name]) for name, value in sums.items()})
        self._lay(step.last)
        timeline.finish("gathering" if self._before == "update" else "reducing")
        return timeline, self._busy

    def _lay(self, stretches: tuple[Stretch, ...]) -> None:
        timeline = self._timeline
        for stretch in stretches:
            before, self._before = self._before, stretch.moment
            if stretch.moment != before:
                timeline.all_gathered()
            if stretch.moment == "load":
                timeline.pause(0.0 if self._run.loads_beside else self._loading, "data")
            if stretch.moment == "update" != before:
                timeline.all_reduced()
                timeline.wait(timeline.to_host, "transfers")
                # The norm of the gradients, or their overflow, is asked for.
                timeline.catch_up()
            self._set_launch(stretch)
            for operation in stretch.operations:
                self._add(operation, stretch.moment)
            if stretch.moment == "backward":
                self._passed = dict(timeline.parts)

    def waits_for_stages(self) -> dict[str, float]:
        """The seconds in which a rank waits while a pipeline fills and drains, by the parts of other stages.

        With stages alike each other stage has those of one micro-batch (Narayanan et al., Efficient Large-Scale
        Language Model Training on GPU Clusters, arXiv 2104.04473, section 2.2). Only the last one loads data as well.
        """
        others = self._run.pipeline_stages - 1
        return {
            name: (min(1, others) if name == "data" else others) * seconds / max(1, self._run.accumulation)
            for name, seconds in self._passed.items()
        }

    def _set_launch(self, stretch: Stretch) -> None:
        """Sets the host's seconds for an operation, with its part of DeepSpeed's hooks.

        The log has the modules of a forward pass, and of one that is repeated, but not those of a backward pass. It
        leaves the same ones.
        """
        self._launch = self._constants.launch.value
        if self._zero.stage < 3 or stretch.moment not in ("forward", "backward") or not stretch.operations:
            return
        # How often the program enters another module.
        entered = sum(one.where != other.where for one, other in pairwise(stretch.operations))
        if stretch.moment == "forward":
            self._entered = entered
        else:
            entered += self._entered
        seconds = entered * self._constants.module.value
        self._busy["module"] += seconds
        self._launch += seconds / len(stretch.operations)

    def _add(self, operation: Operation, moment: str) -> None:
        kind = kind_of(operation)
        if operation.on_host:
            self._timeline.wait(self._timeline.to_host, "transfers")
            self._timeline.catch_up()
            seconds = self._launch + host_seconds(operation, self._cluster, self._constants)
            self._timeline.pause(seconds, "host_update")
        elif kind in COLLECTIVES:
            self._transfer(operation, kind, moment)
        elif kind in ("to_host", "to_device"):
            self._copy(operation, kind, moment)
        elif kind in DISK:
            self._swap(operation, kind)
        elif operation.moved or operation.flops:
            seconds = self._priced(operation, kind)
            self._busy["launch"] += self._constants.launch.value
            self._timeline.compute(seconds, self._launch, "update" if moment == "update" else "compute")

    def _priced(self, operation: Operation, kind: str) -> float:
        run = self._run
        key = operation[:4]
        if (seconds := self._prices.get(key)) is None:
            dtype = run.dtypes[operation.dtype] if run.dtypes else ""
            seconds = kernel_seconds(
                operation, dtype, self._cluster.device, self._constants, run.versions.get("torch", "")
            )
            self._prices[key] = seconds
        self._busy[_CLASSES.get(kind, "memory")] += seconds
        return seconds

    def _transfer(self, operation: Operation, kind: str, moment: str) -> None:
        run, timeline, zero = self._run, self._timeline, self._zero
        group = group_of(operation, run, self._cluster)
        seconds = collective_seconds(kind, operation.moved, group, self._cluster, self._constants)
        self._busy["network" if group.hosts > 1 else "link"] += seconds
        self._busy["collective"] += self._constants.collective.value
        part = self._part(operation, kind, moment)
        passes = moment in ("forward", "backward")
        gathers = part == "gathering" and zero.stage == 3 and passes
        end = timeline.carry(
            seconds, self._constants.collective.value + self._launch, after_device=not gathers or not zero.overlaps
        )
        if gathers and zero.overlaps:
            dtype = run.dtypes[operation.dtype] if run.dtypes else ""
            size = 4 if dtype.endswith("float32") else 8 if dtype.endswith("float64") else 2
            timeline.gather_ahead(end, operation.moved, zero.prefetched * size)
        elif part == "reducing" and passes and zero.overlaps:
            timeline.reduce_behind(end)
        else:
            timeline.wait(end, part)

    def _part(self, operation: Operation, kind: str, moment: str) -> str:
        of_states = self._run.shares_states(operation)
        if moment == "update":
            return "gathering" if kind in ("all_gather", "broadcast") else "reducing"
        if not of_states or kind in ("all_to_all", "send"):
            return "exchanging"
        if kind in ("all_gather", "broadcast"):
            return "gathering"
        return "reducing" if moment != "forward" else "exchanging"

    def _copy(self, operation: Operation, kind: str, moment: str) -> None:
        timeline, zero = self._timeline, self._zero
        optimizer = kind == "to_host" or moment == "update"
        # What changes its format goes by way of pages that are not locked.
        pinned = (zero.pins_optimizer if optimizer else zero.pins_params) and not operation.flops
        seconds = copy_seconds(operation.moved, pinned, self._cluster, self._constants)
        self._busy["copies"] += seconds
        timeline.host += self._launch
        if kind == "to_host":
            timeline.to_host = max(timeline.to_host, timeline.host, timeline.device, timeline.links) + seconds
            end = timeline.to_host
        else:
            timeline.to_device = max(timeline.to_device, timeline.host) + seconds
            end = timeline.to_device
        if not pinned:
            # A copy of pages that are not locked keeps the host.
            timeline.pause(end - timeline.host, "transfers")
        if moment not in ("forward", "backward") or not zero.overlaps:
            timeline.wait(end, "transfers")

    def _swap(self, operation: Operation, kind: str) -> None:
        if not operation.moved:
            self._timeline.swapped(kind)
            return
        seconds = swap_seconds(kind, operation.moved, self._cluster, self._constants)
        self._busy["disk"] += seconds
        self._timeline.swap(kind, seconds)


def _shares(parts: Mapping[str, float], busy: Mapping[str, float]) -> dict[str, float]:
    """The share of a step that each constant decides.

    What the device waited for is divided among the constants of its kind by their busy seconds.
    """
    total = sum(parts.values()) or 1.0
    kinds = {
        ("matmul", "attention", "memory"): parts["compute"] + parts["update"],
        ("link", "network"): parts["gathering"] + parts["reducing"] + parts["exchanging"],
        _ISSUED: parts["launches"],
    }
    shares = {
        name: part / total * busy[name] / (sum(busy[each] for each in names) or 1.0)
        for names, part in kinds.items()
        for name in names
    }
    return shares | {
        "to_host": parts["transfers"] / total,
        "host_update": parts["host_update"] / total,
        "disk": parts["disk"] / total,
        "whole": 1.0,
    }
