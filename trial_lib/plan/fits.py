"""Whether an arm fits a device: the peak with its 90 % interval, the probability, and the largest micro-batch.

The peak of live bytes is counted. The error has sources with their own constants: the CUDA context and NCCL, the pieces
of segments that the allocator cannot use (`PIECES_ERROR`), and whatever a foreseen run cannot see (`PROGRAM_ERROR`).
That is workspaces, other kernels than those of the foreseen run, and blocks that a stream has not yet given back.

Reserved memory is less certain than allocated memory. A long run has other samples, evaluations and checkpoints, so its
cache grows for as long as the device has room. A full device gives cached segments back, so a reading there is between
the needed bytes and the whole device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import hypot
from statistics import NormalDist

from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun
from zerotune.trial_lib.plan.device_memory import (
    AllocatorSettings,
    LiveBytes,
    MomentPeak,
    Reserved,
    least_reserved,
    live_bytes,
    replay,
    rounded,
)
from zerotune.trial_lib.plan.devices import DeviceFigures
from zerotune.trial_lib.plan.scaling import growth_between, have_same_events
from zerotune.trial_lib.search.budgets import FORESEEN_ERROR, Uncertain

GIB, MIB = 2**30, 2**20

# Memory that no allocation of a program shows: workspaces, the CUDA context, the buffers of NCCL.

CONTEXT = Uncertain(0.5 * GIB, 0.15 * GIB)
"""Driver, CUDA context and the kernels that were loaded, since CUDA 11.7 loads them when they are first used.

About 300 MB (github.com/pytorch/pytorch/issues/107667) to 400 MB (github.com/pytorch/pytorch/issues/109888). An H200
with CUDA 13.0 and driver 580 showed 527 MiB for the context and 92 MiB for the first kernel
(`benchmarks/results/gpu_h200_probe.json`).
"""

CONTEXT_OF_ALL_KERNELS = Uncertain(1.0 * GIB, 0.25 * GIB)
"""The same before CUDA 11.7, which loaded all kernels: over 1000 MB (github.com/pytorch/pytorch/issues/107667)."""

_NCCL_PAIR = Uncertain(0.53 * GIB, 0.25 * GIB)
_NCCL_NODE = Uncertain(0.67 * GIB, 0.3 * GIB)
_NCCL_NODES = Uncertain(1.0 * GIB, 0.45 * GIB)


def in_all(*parts: Uncertain) -> Uncertain:
    """The sum of numbers whose errors are independent."""
    return Uncertain(sum(part.mean for part in parts), hypot(*(part.deviation for part in parts)))


def communication(world: int, ranks_per_node: int) -> Uncertain:
    """The bytes of NCCL's buffers for one communicator over all ranks.

    Four A100 with NVLink showed 544 MB for a pair and 688 MB for more (github.com/NVIDIA/nccl/issues/964). Beyond two
    nodes the memory no longer grows (github.com/NVIDIA/nccl/issues/986). Several nodes are between that and the 1.6 GB
    of github.com/NVIDIA/nccl/issues/864. DeepSpeed opens a communicator for a single rank, too: 558 MiB on an H200
    (`benchmarks/results/gpu_h200_probe.json`).
    """
    if world > ranks_per_node:
        return _NCCL_NODES
    return _NCCL_PAIR if world <= 2 else _NCCL_NODE


def outside_pytorch(world: int, ranks_per_node: int, *, loads_all_kernels: bool = False) -> Uncertain:
    """The bytes that `nvidia-smi` shows beyond what PyTorch has reserved. CUDA before 11.7 `loads_all_kernels`."""
    context = CONTEXT_OF_ALL_KERNELS if loads_all_kernels else CONTEXT
    return in_all(context, communication(world, ranks_per_node))


def workspaces(capability: float = 8.0) -> tuple[int, ...]:
    """The bytes of each workspace of cuBLAS, which PyTorch allocates as any tensor.

    One is of the thread of the forward pass, one of the thread of the backward pass. Source: `parseChosenWorkspaceSize`
    of `aten/src/ATen/cuda/CublasHandlePool.cpp`, in which the default is `:4096:2:16:8`, and 32 MiB from Hopper on.
    """
    size = 32 * MIB if capability >= 9.0 else (2 * 4096 + 8 * 16) * 1024
    return size, size


# The widths of intervals. `benchmarks/foresee/public_gpus/fit_memory.py` finds the next three from public peaks, and
# judges them by sources that are left out. Programs were rebuilt from facts there, so one's own run may be nearer.

PROGRAM_ERROR = FORESEEN_ERROR
"""Standard deviation of the allocated peak, as a share."""

PIECES_ERROR = 0.604
"""Standard deviation of the memory that the allocator cannot use, as a share of what it reserves beyond the peak."""

UNLIKE = 1.3
"""How many times as wide the interval of a training is that is like none of those peaks: the most that the peaks of a
kind of training or device need if the widths come from all others."""

# The compute capabilities of V100, A100, A10G, H200 and B200.
_MEASURED_ON = (7.0, 8.0, 8.6, 9.0, 10.0)


def unmeasured(run: ForeseenRun, device: DeviceFigures) -> str:
    """What of a training no measured peak is like, in words; empty if there is nothing."""
    words = {
        "batches without tokens": run.tokens is None,
        "weights of few bits": bool({"uint8", "int8"} & set(run.dtypes)) and run.trainable < run.parameters,
        "experts": any("expert" in name.lower() for name in run.modules),
        "a pipeline": run.is_pipeline,
        device.name: device.capability not in _MEASURED_ON or device.sheet.startswith("Instinct"),
    }
    return " or of ".join(name for name, is_so in words.items() if is_so)


GROWS = 0.2
"""Share of runs whose reserved memory grows on after the foreseen steps, to anything up to the whole device.

Read off the decided rows of reserved or shown memory, or of an unknown kind: 3 of 18 have a fifth more than is
foreseen, or over. Two of the three are of an unknown kind.
"""

FULL = 0.5
"""Share of runs that are read as full, if their device gets full. The others have given segments back. Set by hand."""

INTERVAL = 0.9
_TRIES = 60
_WIDTH = NormalDist().inv_cdf((1 + INTERVAL) / 2)


@dataclass(frozen=True, kw_only=True)
class PeakForecast:
    micro_batch: int  # samples
    live: LiveBytes  # live bytes by moment, without workspaces
    allocated: Uncertain  # as `torch.cuda.max_memory_allocated` shows
    reserved: Uncertain  # as `torch.cuda.max_memory_reserved` shows on a device that never gets full
    shown: Uncertain  # as `nvidia-smi` shows on such a device
    needed: Uncertain  # the least memory of a device on which it runs

    @classmethod
    def of(
        cls,
        *,
        micro_batch: int,
        live: LiveBytes,
        allocated: float,
        reserved: float,
        least: float,
        outside: Uncertain,
        program_error: float = PROGRAM_ERROR,
        pieces_error: float = PIECES_ERROR,
    ) -> "PeakForecast":
        """Adds the uncertainty of each part.

        `least` is about the least bytes that a device has to have for PyTorch, and `outside` lies beyond PyTorch's
        memory.
        """
        in_use, gap = Uncertain(allocated, program_error * allocated), reserved - allocated
        kept = in_all(in_use, Uncertain(gap, pieces_error * gap))
        return cls(
            micro_batch=micro_batch,
            live=live,
            allocated=in_use,
            reserved=kept,
            shown=in_all(kept, outside),
            needed=in_all(in_use, Uncertain(least - allocated, pieces_error * gap), outside),
        )

    def fits(self, capacity: float) -> float:
        """The probability that it fits `capacity` bytes (`torch.cuda.mem_get_info` on an idle device)."""
        if self.needed.deviation <= 0:
            return float(self.needed.mean <= capacity)
        return NormalDist(self.needed.mean, self.needed.deviation).cdf(capacity)


def interval(number: Uncertain) -> tuple[float, float]:
    return max(0.0, number.mean - _WIDTH * number.deviation), number.mean + _WIDTH * number.deviation


@dataclass(frozen=True)
class ForeseenWay:
    """What is foreseen of a figure in one way, such as with activations recomputed."""

    weight: float  # the probability of the way
    figure: Uncertain  # bytes of it, on a device that never gets full
    needed: Uncertain  # the least bytes of a device on which it runs


def peak_interval(forecast: PeakForecast, capacity: float) -> tuple[float, float]:
    """The ends of the 90 % interval of the peak of a step on a device with `capacity` bytes for programs."""
    low, high = interval(forecast.needed)
    _, kept = ends_of([ForeseenWay(1.0, forecast.shown, forecast.needed)], capacity, is_kept=True)
    return low, max(high, kept)


def ends_of(ways: Sequence[ForeseenWay], most: float, is_kept: bool) -> tuple[float, float]:
    """The ends of the 90 % interval of a figure, by ways whose weights add up to 1.

    The figure cannot exceed `most` bytes (infinity if nothing is known). `is_kept`: it has what the allocator keeps.
    """

    def below(size: float) -> float:
        if size >= most:
            return 1.0
        return sum(way.weight * (_kept(way, most) if is_kept else _normal(way.figure))(size) for way in ways)

    top = max(way.figure.mean + 10 * way.figure.deviation for way in ways)
    highest = top if most == float("inf") else most
    return _quantile(below, (1 - INTERVAL) / 2, highest), _quantile(below, (1 + INTERVAL) / 2, highest)


def _normal(figure: Uncertain) -> Callable[[float], float]:
    return NormalDist(figure.mean, max(1.0, figure.deviation)).cdf


def _kept(way: ForeseenWay, most: float) -> Callable[[float], float]:
    if way.figure.mean >= most:
        given_back = _normal(way.needed)
        return lambda size: (1 - FULL) * given_back(size)
    as_foreseen = _normal(way.figure)
    if most == float("inf"):
        return as_foreseen
    room = most - way.figure.mean

    def below(size: float) -> float:
        grown = min(1.0, max(0.0, (size - way.figure.mean) / room))
        return (1 - GROWS) * as_foreseen(size) + GROWS * grown

    return below


def _quantile(below: Callable[[float], float], share: float, highest: float) -> float:
    low, high = 0.0, highest
    for _ in range(_TRIES):
        middle = (low + high) / 2
        if below(middle) < share:
            low = middle
        else:
            high = middle
    return high


# Live bytes of any micro-batch, from two runs of one arm at two micro-batches.


@dataclass(frozen=True)
class PeakLine:
    """Live bytes as a line in the micro-batch: `base + slope * micro_batch`."""

    base: float  # bytes
    slope: float  # bytes for each sample
    kinds: tuple[tuple[float, float], ...]  # base and slope of each kind, in the order of `KINDS`
    event: int  # index of the event

    def at(self, micro_batch: float) -> float:
        return self.base + self.slope * micro_batch


@dataclass(frozen=True, kw_only=True)
class MomentLines:
    name: str  # one of `MOMENTS`
    step: int  # the optimizer step, from 1
    micro_batch: int  # of the step, from 0
    lines: tuple[PeakLine, ...]  # of which the highest is the peak
    at_begin: PeakLine  # live bytes when it begins
    at_end: PeakLine  # live bytes when it ends

    def at(self, micro_batch: float) -> MomentPeak:
        highest = max(self.lines, key=lambda line: line.at(micro_batch))
        return MomentPeak(
            name=self.name,
            step=self.step,
            micro_batch=self.micro_batch,
            peak=highest.at(micro_batch),
            by_kind=tuple(base + slope * micro_batch for base, slope in highest.kinds),
            at_begin=self.at_begin.at(micro_batch),
            at_end=self.at_end.at(micro_batch),
            event=highest.event,
        )


@dataclass(frozen=True, kw_only=True)
class BySize:
    place: str  # one of `PLACES`
    moments: tuple[MomentLines, ...]  # of the run, in order
    # The same with fewer micro-batches in a step; empty if there is one number of them
    fewer: tuple[MomentLines, ...] = ()
    fewer_from: int = 0  # the smallest micro-batch, in samples, whose steps have that fewer

    def at(self, micro_batch: float) -> LiveBytes:
        moments = self.fewer if self.fewer and micro_batch >= self.fewer_from else self.moments
        return LiveBytes(place=self.place, moments=tuple(moment.at(micro_batch) for moment in moments))


def by_size(one: ForeseenRun, other: ForeseenRun | None = None, place: str = "device") -> BySize:
    """Live bytes of any micro-batch, from runs of one arm at two of them. With one run they are the same for all.

    Raises ValueError if both runs have the same micro-batch.
    """
    if other is None:
        return BySize(place=place, moments=_by_event(one, one, place))
    if one.micro_batch == other.micro_batch:
        raise ValueError("the two runs have the same micro_batch")
    if have_same_events(one, other):
        return BySize(place=place, moments=_by_event(one, other, place))
    small, large = sorted((one, other), key=lambda run: run.micro_batch)
    if _micro_batches(large) < _micro_batches(small):
        grows, shrinks = growth_between(small, large), growth_between(large, small)
        if grows is not None and shrinks is not None:
            return BySize(
                place=place,
                moments=_by_event(small, grows.of(small), place),
                fewer=_by_event(large, shrinks.of(large), place),
                fewer_from=large.micro_batch,
            )
    return BySize(place=place, moments=_by_moment(one, other, place))


def _micro_batches(run: ForeseenRun) -> int:
    return max((moment.micro_batch for moment in run.moments), default=0) + 1


def _by_event(one: ForeseenRun, other: ForeseenRun, place: str) -> tuple[MomentLines, ...]:
    index = PLACES.index(place)
    between = other.micro_batch - one.micro_batch
    # Each storage as a line in the micro-batch.
    pieces: list[tuple[float, float]] = []
    for mine, its in zip(one.storages, other.storages, strict=True):
        size = rounded(mine.size, place) if mine.place == index else 0.0
        slope = (rounded(its.size, place) - size) / between if mine.place == index and between else 0.0
        pieces.append((size - slope * one.micro_batch, slope))
    live = [[0.0, 0.0] for _ in KINDS]
    base = slope = 0.0
    found: list[MomentLines] = []
    for moment, its_events in one.events_by_moment():
        # The events that have the peak at some micro-batch.
        first = moment.event
        points = [(slope, base, -1)]
        at_begin, before = _line(live, first), [each.copy() for each in live]
        for event in its_events:
            storage, is_made = one.events[event]
            sign = 1 if is_made else -1
            piece = pieces[storage]
            base, slope = base + sign * piece[0], slope + sign * piece[1]
            points.append((slope, base, event))
        top = {event for _, _, event in _envelope(points)}
        # Their bytes by kind.
        lines = [at_begin] if -1 in top else []
        live = before
        for event in its_events:
            storage, is_made = one.events[event]
            sign = 1 if is_made else -1
            kind = live[one.storages[storage].kind]
            kind[0] += sign * pieces[storage][0]
            kind[1] += sign * pieces[storage][1]
            if event in top:
                lines.append(_line(live, event))
        found.append(
            MomentLines(
                name=MOMENTS[moment.name],
                step=moment.step,
                micro_batch=moment.micro_batch,
                lines=tuple(lines),
                at_begin=at_begin,
                at_end=_line(live, its_events.stop),
            )
        )
    return tuple(found)


def _line(live: Sequence[Sequence[float]], event: int) -> PeakLine:
    kinds = tuple((each[0], each[1]) for each in live)
    return PeakLine(sum(base for base, _ in kinds), sum(slope for _, slope in kinds), kinds, event)


def _envelope(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    # The (slope, base, event) of the lines that are the highest for some micro-batch above 0.
    hull: list[tuple[float, float, int]] = []

    def is_last_below(point: tuple[float, float, int]) -> bool:
        one, middle = hull[-2:]
        return (one[1] - point[1]) * (middle[0] - one[0]) <= (one[1] - middle[1]) * (point[0] - one[0])

    for point in sorted(points):
        if hull and point[0] - hull[-1][0] < 1e-9:
            if point[1] <= hull[-1][1]:
                continue
            hull.pop()
        while hull and (hull[-1][1] <= point[1] or (len(hull) > 1 and is_last_below(point))):
            hull.pop()
        hull.append(point)
    return hull


def _pairs(mine: Sequence[MomentPeak], theirs: Sequence[MomentPeak]) -> list[tuple[MomentPeak, MomentPeak]]:
    """Each moment of a run with that of another run: by their places, if both have the same in the same order.

    If not, a moment goes with the highest of its name in the same micro-batch, or in the last that the other has.
    """
    places = [[(each.name, each.step, each.micro_batch) for each in moments] for moments in (mine, theirs)]
    if places[0] == places[1]:
        return list(zip(mine, theirs, strict=True))
    most = max((each.micro_batch for each in theirs), default=0)
    by_peak = sorted(theirs, key=lambda each: each.peak)
    highest = {(each.name, each.step, each.micro_batch): each for each in by_peak}
    return [(each, highest.get((each.name, each.step, min(each.micro_batch, most)), each)) for each in mine]


def _by_moment(one: ForeseenRun, other: ForeseenRun, place: str) -> tuple[MomentLines, ...]:
    between = other.micro_batch - one.micro_batch
    found: list[MomentLines] = []
    for mine, its in _pairs(live_bytes(one, place).moments, live_bytes(other, place).moments):

        def through(size: float, larger: float) -> tuple[float, float]:
            slope = (larger - size) / between
            return size - slope * one.micro_batch, slope

        kinds = tuple(through(*pair) for pair in zip(mine.by_kind, its.by_kind, strict=True))
        found.append(
            MomentLines(
                name=mine.name,
                step=mine.step,
                micro_batch=mine.micro_batch,
                lines=(PeakLine(*through(mine.peak, its.peak), kinds, mine.event),),
                at_begin=PeakLine(*through(mine.at_begin, its.at_begin), (), mine.event),
                at_end=PeakLine(*through(mine.at_end, its.at_end), (), mine.event),
            )
        )
    return tuple(found)


# The memory of an arm at any micro-batch.


class _Same:
    """A run that equals itself alone, so that a cache need not compare events."""

    def __init__(self, run: ForeseenRun) -> None:
        self.run = run

    def __hash__(self) -> int:
        return id(self.run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.run is self.run


@lru_cache(maxsize=64)
def _replayed(same: _Same, settings: AllocatorSettings, before: tuple[int, ...]) -> tuple[Reserved, float]:
    # The replay on a device without a limit, and the least bytes that suffice. It takes about a second.
    found = replay(same.run, settings, before=before)
    return found, least_reserved(same.run, found, settings, before)


@dataclass(frozen=True, kw_only=True)
class ArmMemory:
    one: ForeseenRun  # a foreseen run of the arm
    other: ForeseenRun | None = None  # the same with another micro-batch; None if there is one run
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)  # of the caching allocator
    ranks_per_node: int = 8  # ranks of one host
    capability: float = 8.0  # the compute capability of the device
    loads_all_kernels: bool = False  # whether CUDA is older than 11.7
    program_error: float = PROGRAM_ERROR  # standard deviation of the allocated peak, as a share

    @cached_property
    def sizes(self) -> BySize:
        return by_size(self.one, self.other)

    @cached_property
    def larger(self) -> ForeseenRun:
        runs = [self.one] if self.other is None else [self.one, self.other]
        return max(runs, key=lambda run: run.micro_batch)

    @cached_property
    def reserved(self) -> Reserved:
        """The replay of the larger run on a device that never gets full."""
        return _replayed(_Same(self.larger), self.settings, workspaces(self.capability))[0]

    @cached_property
    def least(self) -> float:
        """Approximate device memory for PyTorch (bytes) below which the larger run does not fit."""
        return _replayed(_Same(self.larger), self.settings, workspaces(self.capability))[1]

    def at(self, micro_batch: int) -> PeakForecast:
        return self.of_live(micro_batch, self.sizes.at(micro_batch))

    def of_live(self, micro_batch: int, live: LiveBytes) -> PeakForecast:
        """The memory of live bytes that the runs themselves do not have, such as those of more layers.

        The allocator adds to them what it adds to the larger run, as a share.
        """
        of_cublas = sum(workspaces(self.capability))
        in_use = live.peak + of_cublas
        # The allocator keeps rests of up to 1 MiB with their blocks, and they count as allocated.
        seen = self.sizes.at(self.larger.micro_batch).peak + of_cublas
        allocated_mean = in_use * self.reserved.allocated / seen if seen else in_use
        scale = allocated_mean / self.reserved.allocated if self.reserved.allocated else 1.0
        return PeakForecast.of(
            micro_batch=micro_batch,
            live=live,
            allocated=allocated_mean,
            reserved=scale * self.reserved.reserved,
            least=scale * self.least,
            outside=outside_pytorch(self.one.world, self.ranks_per_node, loads_all_kernels=self.loads_all_kernels),
            program_error=self.program_error,
        )
