"""The memory model: which candidate fits, and how sure that is. It starts analytic, and every measured peak refines it.

It models the memory of the steps above initialisation. The memory of initialisation shows in what it leaves
(`Memory.available`). Everything is in bytes on one device.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE_PLACES
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.switches import PROGRAM, switch_key, switches_of
from zerotune.trial_lib.search.allocations import (
    Allocations,
    ForeseenArm,
    allocations,
    foreseen_allocations,
    nearest_arm,
)
from zerotune.trial_lib.search.budgets import Budget, MemoryBasis
from zerotune.trial_lib.search.peak_regression import Mixture, PeakRegression, Prior
from zerotune.trial_lib.search.zero_settings import ArmKey, ZeroSettings, arm_key

# How switches of the program change the activations that it keeps.

Switches: TypeAlias = tuple[tuple[str, str], ...]
"""Place and value (its `repr`) of each switch that decides memory."""

# Each value is expected to keep no more than the one before it. A Hugging Face Trainer's own options are the same
# switches.
_ATTENTION = [repr(value) for value in ("eager", "sdpa", "flash_attention_2")]
_FROM_MOST = {
    CHECKPOINTING: [repr(value) for value in ("none", "every_second", "full")],
    "--gradient_checkpointing": [repr(value) for value in (False, True)],
    ATTENTION: _ATTENTION,
    "--attn_implementation": _ATTENTION,
}
# If no fused kernel takes a program's attention, PyTorch's `sdpa` computes it by matrix products and keeps more than
# attention as written. On two samples of four heads and 256 tokens, on a CPU, autograd saved 3.5 MiB for 3.0 in bf16.
# `tests/unit/search/test_attention_as_kept.py` shows it again.
_UNSURE = frozenset(repr(value) for value in ("eager", "sdpa"))
# With every second of its blocks recomputed, a program keeps the others as without recomputation: half of it.
_HALF_OF = {(CHECKPOINTING, repr("every_second")): repr("none")}
# Such a switch changes no more than another arm does. On a CPU the compiler stays in the resident memory of a rank.
_LIKE_AN_ARM = {"cuda": frozenset(COMPILE_PLACES), "cpu": frozenset[str]()}


class Keeps(Enum):
    """The activations that a program with some switches keeps, beside those with others."""

    LESS, AS_MUCH, MORE, UNKNOWN = range(4)


def keeps(switches: Switches, other: Switches, surely: bool = False) -> Keeps:
    """Returns whether some switches are expected to keep more activations than others; `surely`, of every program."""
    own, others = dict(switches), dict(other)
    differing = [place for place in {**own, **others} if own.get(place) != others.get(place)]
    if not differing:
        return Keeps.AS_MUCH
    if surely and any({own.get(place), others.get(place)} == _UNSURE for place in differing):
        return Keeps.UNKNOWN
    found = {_keeps_less(place, own.get(place), others.get(place)) for place in differing}
    if len(found) > 1 or None in found:
        return Keeps.UNKNOWN
    return Keeps.LESS if True in found else Keeps.MORE


@dataclass(frozen=True)
class Beside:
    """What a program keeps beside tried switches."""

    keeps: Keeps  # less or more than with them
    surely: bool  # whether that holds for every program
    values: Mapping[str, Any]  # the tried values of the switches that decide memory, by their places
    part: int = 1  # it keeps more than with them at the micro-batch size divided by this


class TriedSwitches:
    """The switches of the trials that have ended."""

    def __init__(self) -> None:
        self._values: dict[Switches, dict[str, Any]] = {}
        self._completed: set[Switches] = set()
        self._around: dict[Switches, list[Beside]] = {}

    def note(self, switches: Switches, program: Mapping[str, Any], completed: bool) -> None:
        """Notes the values of a trial's switches, by place. One that has not completed ran out of memory."""
        self._values.setdefault(switches, {place: program[place] for place, _ in switches})
        if completed:
            self._completed.add(switches)
        self._around.clear()

    def has_run(self, switches: Switches) -> bool:
        return switches in self._completed

    def around(self, switches: Switches) -> list[Beside]:
        """The tried switches that bound what a program with others keeps, surely or as expected."""
        if switches not in self._around:
            self._around[switches] = [
                each for tried, values in self._values.items() for each in _bounds(switches, tried, values)
            ]
        return self._around[switches]


def _bounds(switches: Switches, tried: Switches, values: Mapping[str, Any]) -> Iterator[Beside]:
    beside = keeps(switches, tried)
    if beside in (Keeps.LESS, Keeps.MORE):
        yield Beside(beside, keeps(switches, tried, surely=True) is beside, values)
    whole = tuple((place, _HALF_OF.get((place, value), value)) for place, value in switches)
    if whole != switches and keeps(whole, tried) in (Keeps.AS_MUCH, Keeps.MORE):
        yield Beside(Keeps.MORE, False, values, part=2)


def without_arm_like(switches: Switches, device: str) -> Switches:
    """Returns switches without those that change memory no more than another arm does."""
    return tuple(each for each in switches if each[0] not in _LIKE_AN_ARM[device])


def other_priors(usual: Sequence[Prior], beside: Keeps) -> tuple[Prior, ...]:
    """Returns the priors of memory with other switches than typed, by the activations that they keep beside those."""
    if beside is Keeps.AS_MUCH:
        return tuple(usual)
    # Recomputation leaves an eighth to a third (2205.05198).
    less = _with_activations(usual[0], 0.5, 0.3, 0.2)
    # So a program without it keeps three to eight times as much, and by the equations alone 17 times. With the scores
    # it keeps 1.6 to 6 times as much, for 512 to 4,096 tokens.
    more = _with_activations(usual[0], 0.3, 5.5, 2.5), _with_activations(usual[0], 0.3, 12.0, 5.0)
    if beside is Keeps.LESS:
        return (*usual, less)
    if beside is Keeps.MORE:
        return (*(replace(prior, weight=prior.weight / 4) for prior in usual), *more)
    return (*usual, less, more[0])


def _with_activations(prior: Prior, weight: float, mean: float, deviation: float) -> Prior:
    means, deviations = list(prior.means), list(prior.deviations)
    means[1], deviations[1] = mean, deviation
    return Prior(weight, tuple(means), tuple(deviations))


def _keeps_less(place: str, value: str | None, other: str | None) -> bool | None:
    known = _FROM_MOST.get(place, [])
    return known.index(value) > known.index(other) if value in known and other in known else None


# The model.


@dataclass(frozen=True)
class Described:
    """The part of a candidate that is the same for all micro-batch sizes of some knobs."""

    settings: ZeroSettings  # what DeepSpeed's part says
    arm: ArmKey  # its coarse knobs
    switches: Switches  # its coarse switches, without those that count as part of an arm
    family: str  # all of its knobs
    foreseen: ForeseenArm | None  # the nearest foreseen arm
    keeps: Keeps  # its activations beside those as typed, or beside those of a foreseen arm
    config: Mapping[str, Any]  # the complete configuration


@dataclass
class ArmRecord:
    measured: int = 0  # completed trials
    largest: dict[str, int] = field(default_factory=dict)  # the largest completed micro-batch size, by family
    failed: dict[str, tuple[int, Allocations]] = field(default_factory=dict)  # smallest size out of memory, by family
    bound: float | None = None  # bytes that do not fit, including initialisation; None until they are computed again

    def decided(self, family: str, size: int) -> float | None:
        """Returns 1 or 0 if trials of a family have shown that a micro-batch size fits or does not; else None."""
        if size <= self.fits(family):
            return 1.0
        return 0.0 if family in self.failed and size >= self.failed[family][0] else None

    def fits(self, family: str) -> int:
        """Returns the largest completed micro-batch size of a family below its failed ones."""
        largest = self.largest.get(family, 0)
        return min(largest, self.failed[family][0] - 1) if family in self.failed else largest


_LOW, _HIGH = 0.05, 0.95
# Features of a moment: a constant, activations, states, buffers, pairs of samples, and the update's own constant.
_Moment: TypeAlias = tuple[float, float, float, float, float, float]
_BACKWARD, _UPDATE = 0, 1  # the places of the moments

_WORKSPACE = {"cpu": 40 * 2**20, "cuda": 64 * 2**20}
MODELLED = frozenset(_WORKSPACE)
"""The kinds of devices whose memory is modelled."""

# How a program's peaks depend on the micro-batch is not known before trials, and formulas or foreseen bytes are its
# scale only. So the prior is a mixture of shapes. Each program has some multiple of the activations, because autograd
# does not save the temporaries within a pass, and a CPU's heap has holes. Few programs have a far one.
MULTIPLES = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0, 16.0)
# From there on a shape's standard deviation is so large a share of the multiple.
_FAR, _FAR_DEVIATION = 8.0, 0.4
# A loss over all pairs of samples has matrices whose bytes grow with the square of the micro-batch.
_PAIRS = 8.0, 5.0  # mean and standard deviation
# The standard deviation of the update's own workspace. Small sizes, whose peak is the update, say little of others.
_OWN_OF_UPDATE = 0.2


@dataclass(frozen=True)
class Shapes:
    """How common shapes of peaks are among programs. Weights: workspace, activations, states, buffers, pairs."""

    multiples: tuple[float, ...]  # shares of programs by their `MULTIPLES` of the activations
    # The share that leaves a CPU's heap in many pieces (a recurrent layer, step by step), so that the update finds no
    # room where the activations were. CUDA's allocator counts the memory in use, and not its place.
    at_once: float
    pairs: float  # the share with a loss over pairs of samples
    means: tuple[float, float, float] = (0.45, 0.7, 1.4)  # of workspace, states and buffers
    deviations: tuple[float, float, float] = (0.4, 0.35, 0.35)
    near: float = 0.2  # the standard deviation of a near multiple, as a share of it
    arms: tuple[float, float] = (0.12, 0.12)  # of the first two weights, from arm to arm of a program

    @property
    def priors(self) -> tuple[Prior, ...]:
        """Those whose moments are apart, then pairs, then those whose features peak at once."""
        (workspace, states, buffers), (of_workspace, of_states, of_buffers) = self.means, self.deviations
        shapes = [(self.pairs, self.usual, self.usual / 3, *_PAIRS, False)]
        for multiple, share in zip(MULTIPLES, self.multiples, strict=True):
            deviation = multiple * (_FAR_DEVIATION if multiple >= _FAR else self.near)
            for at_once, of_kind in ((False, 1 - self.at_once), (True, self.at_once)):
                shapes.append(((1 - self.pairs) * share * of_kind, multiple, deviation, 0.0, 0.0, at_once))
        shapes.sort(key=lambda shape: (shape[-1], shape[3] > 0))
        return tuple(
            Prior(
                weight,
                (workspace, mean, states, buffers, pairs, 0.0),
                (of_workspace, sd, of_states, of_buffers, of_pairs, _OWN_OF_UPDATE),
                at_once,
            )
            for weight, mean, sd, pairs, of_pairs, at_once in shapes
            if weight
        )

    @property
    def usual(self) -> float:
        """The mean of the near multiples."""
        near = [(share, each) for share, each in zip(self.multiples, MULTIPLES, strict=True) if each < _FAR]
        return sum(share * each for share, each in near) / sum(share for share, _ in near)


SHAPES = {
    ("cpu", False): Shapes((0.026, 0.049, 0.241, 0.513, 0.05, 0.026, 0.028, 0.069), 0.244, 0.125),
    ("cpu", True): Shapes(
        (0.057, 0.373, 0.326, 0.072, 0.055, 0.059, 0.03, 0.028),
        *(0.144, 0.094, (0.55, 0.95, 1.05), (0.3, 0.4, 0.3)),
        arms=(0.2, 0.12),
    ),
    # No tables of several programs on GPUs exist, so these are assumptions.
    ("cuda", False): Shapes(
        (0.02, 0.08, 0.55, 0.13, 0.06, 0.07, 0.09, 0.0), 0.0, 0.1, (1.0, 1.0, 1.3), (0.6, 0.3, 0.7)
    ),
    ("cuda", True): Shapes(
        (0.04, 0.88, 0.04, 0.02, 0.02, 0.0, 0.0, 0.0), 0.0, 0.02, (1.0, 1.0, 1.0), (0.6, 0.1, 0.25), near=0.12
    ),
}
"""By the kind of device, and by whether memory was foreseen."""
# Standard deviations of a measurement, as shares of it. A CPU's resident memory scatters, and CUDA's allocator counts.
_NOISE_LEVELS = {"cpu": (0.02, 0.04, 0.07, 0.11, 0.17), "cuda": (0.003, 0.01, 0.02, 0.04, 0.08, 0.16)}
# The part of a measured peak's scatter that decides whether it fits. On a CPU a peak is resident memory. It scatters
# by 6 to 9 % between repeats of a candidate. A limit counts allocations, which hardly do: of 786 repeated candidates of
# the recorded tables only 19 ended both ways.
_SCATTER_OF_FIT = {"cpu": 0.3, "cuda": 1.0}
# Autograd does not save the inputs of frozen layers, but they are there. Of such programs one was recorded: its blocks,
# which are recomputed, take 15 times the activations. So a program with few trained parameters may have any multiple,
# unless a foreseen run has its temporaries and no heap has holes.
_FROZEN = 0.5
_PROFILE_NOISE = 3.0
# A sweep's group stays this many standard deviations below the memory that is expected to fit.
_SURELY = 1.5


@dataclass(frozen=True)
class MemoryPrediction:
    """The memory of a trial above initialisation, in bytes on the rank that takes most."""

    value: float  # the median
    low: float  # the lower end of the 90 % interval
    high: float  # its upper end
    measured: int  # completed trials of the arm so far


def measured_above_initialize(memory: Memory) -> int | None:
    """Returns the bytes above initialisation on the rank that took most; None if not measured."""
    return max(memory.above_initialize, default=None)


class MemoryModel:
    """The memory of a model's candidates. It depends only on its arguments and on the observations, in their order. The
    prior is the foreseen arms, or else the formulas. The coarse switches are places of the program's switches that
    decide memory. Trials with other values of them bound a candidate's memory if these keep more activations or fewer.
    Otherwise they say nothing of it.
    """

    def __init__(self, basis: MemoryBasis, coarse_switches: Collection[str] = (), shapes: Shapes | None = None) -> None:
        profile, device, foreseen = basis.profile, basis.device, tuple(basis.arms)
        self._profile = profile
        self._base = basis.base_config
        self._slots = basis.slots
        self._device = device
        self._profiled = ZeroSettings.of(self._base, profile.bytes_per_param)
        self._unit = float(_WORKSPACE[device])
        self._foreseen = foreseen
        shapes = shapes or SHAPES[device, bool(foreseen)]
        is_exact = device == "cuda" and bool(foreseen)
        if profile.trainable_num_params < _FROZEN * profile.num_params and not is_exact:
            shapes = replace(shapes, multiples=tuple((share + 1 / len(MULTIPLES)) / 2 for share in shapes.multiples))
        workspace, states, buffers = shapes.means
        self._means = workspace, shapes.usual, states, buffers, 0.0, 0.0
        # What the size of a layout changes, formulas and foreseen arms know.
        self._coarse_switches = frozenset(coarse_switches) - frozenset(basis.base_config.get(LAYOUTS) or {})
        self._shapes, self._priors = shapes, shapes.priors
        self._typed = without_arm_like(self._switches_in(self._base), device)
        self._peaks_with: dict[Switches, PeakRegression] = {}
        self._budget = Budget(profile.gpu_mem, device, bool(foreseen))
        self._arms: dict[ArmKey, ArmRecord] = {}
        self._described: dict[str, Described] = {}
        self._tried = TriedSwitches()
        # Until a trial ends: probabilities, and what bounds them.
        self._known: dict[tuple[str, int, float], float] = {}
        self._beside: dict[str, list[tuple[Beside, Described]]] = {}

    def observe(self, candidate: Candidate, result: TrialResult) -> None:
        """Only a trial that completed or ran out of memory teaches anything."""
        if result.outcome is Outcome.COMPLETED:
            self._observe_peak(candidate, result.memory)
        elif result.outcome is Outcome.OUT_OF_MEMORY:
            self._observe_failure(candidate)

    def observe_profile(self, candidate: Candidate, result: TrialResult) -> None:
        """Its one step shows less than several, and it does not count for its arm."""
        above = measured_above_initialize(result.memory)
        if result.outcome is not Outcome.COMPLETED or above is None:
            return
        described = self._describe(candidate.knobs)
        self._tried.note(described.switches, switches_of(described.config), completed=True)
        needed = self._allocations(described, candidate)
        scale = _PROFILE_NOISE * self._scale(needed)
        self._peaks(described).observe(self._moments(needed), described.arm, scale, above / self._unit)
        self._forget()
        if result.memory.available:
            self._budget.observe_profile(needed.initialize, min(result.memory.available))

    def above_initialize(self, candidate: Candidate) -> MemoryPrediction:
        described = self._describe(candidate.knobs)
        mixture = self._predict(described, self._allocations(described, candidate))
        record = self._arms.get(described.arm)
        value, low, high = (max(0.0, mixture.quantile(share)) for share in (0.5, _LOW, _HIGH))
        return MemoryPrediction(value, low, high, 0 if record is None else record.measured)

    def allocations(self, candidate: Candidate) -> Allocations:
        """Returns a candidate's allocations before any measurement: foreseen, or by DeepSpeed's own formulas."""
        return self._allocations(self._describe(candidate.knobs), candidate)

    def available(self, candidate: Candidate) -> int | None:
        """The memory that initialisation leaves, by trials of this or other arms; None for a CPU without a budget."""
        described = self._describe(candidate.knobs)
        left = self._budget.left(described.arm, self._allocations(described, candidate).initialize)
        return None if left is None else int(left.mean)

    def probability_fits(self, candidate: Candidate, headroom: float) -> float:
        """Returns the probability that a candidate runs without going out of memory. It is 0 if a trial of its arm with
        no larger need ran out of memory. It is 1 if a trial of its family with no smaller need completed, with or
        without the headroom. The same holds of trials with switches that keep fewer or more activations, if no trial
        with its own decides. Until one has completed, their expectations are bounds too.
        """
        described = self._describe(candidate.knobs)
        asked = described.family, candidate.micro_batch_size, headroom
        if asked not in self._known:
            self._known[asked] = self._probability(described, candidate, headroom)
        return self._known[asked]

    def _probability(self, described: Described, candidate: Candidate, headroom: float) -> float:
        decided = self._decided(described, candidate)
        if decided is not None:
            return decided
        fits, has_run = self._fits(described, candidate, headroom), self._tried.has_run(described.switches)
        # Trials with switches that keep more show what fits, and those with switches that keep less show what does not.
        for beside, other in self._around(described):
            size = candidate.micro_batch_size // beside.part
            if not size or (has_run and not beside.surely):
                continue  # a measured need is nearer than the expectation of another one
            sized = candidate if beside.part == 1 else candidate.model_copy(update={"micro_batch_size": size})
            bound = self._decided(other, sized) if beside.surely else None
            if bound is None and has_run:
                continue
            bound = self._fits(other, sized, headroom) if bound is None else bound
            fits = max(fits, bound) if beside.keeps is Keeps.LESS else min(fits, bound)
        return fits

    def _around(self, described: Described) -> list[tuple[Beside, Described]]:
        if described.family not in self._beside:
            config, program = described.config, switches_of(described.config)
            self._beside[described.family] = [
                (beside, self._describe({**config, PROGRAM: {**program, **beside.values}}))
                for beside in self._tried.around(described.switches)
            ]
        return self._beside[described.family]

    def _decided(self, described: Described, candidate: Candidate) -> float | None:
        # Whether a candidate fits, as 1 or 0, if trials with its own switches have shown it.
        record = self._arms.get(described.arm)
        if record is None:
            return None
        decided = record.decided(described.family, candidate.micro_batch_size)
        if decided is not None or not record.failed:
            return decided
        if record.bound is None:
            record.bound = min(self._counted(described, needed) for _, needed in record.failed.values())
        return 0.0 if self._counted(described, self._allocations(described, candidate)) >= record.bound else None

    def _fits(self, described: Described, candidate: Candidate, headroom: float) -> float:
        needed = self._allocations(described, candidate)
        left = self._budget.left(described.arm, needed.initialize)
        if left is None:
            return 1.0
        limit = self._budget.limit(described.arm, left, headroom)
        # The uncertainties of the two moments are mostly the same. So the moment that is less likely to fit
        # decides for both, and a larger size never becomes likelier.
        scatter = _SCATTER_OF_FIT[self._device]
        moments = [self._predict(described, needed, moment, scatter) for moment in (_BACKWARD, _UPDATE)]
        return min(moment.below(limit.mean - needed.limit_correction, limit.deviation) for moment in moments)

    def group_headroom(self, candidate: Candidate, headroom: float) -> float:
        """Returns the share of the memory left by initialisation that a sweep's process group should keep free. The
        group sees the memory that is left and the needs of its sizes, but not the slack.
        """
        described = self._describe(candidate.knobs)
        needed = self._allocations(described, candidate)
        left = self._budget.left(described.arm, needed.initialize)
        if left is None or left.mean <= 0:
            return headroom
        limit = self._budget.limit(described.arm, replace(left, deviation=0.0), headroom)
        surely = limit.mean - needed.limit_correction - _SURELY * limit.deviation
        return min(max(0.0, 1 - surely / left.mean), 1.0)

    def largest_micro_batch(
        self,
        knobs: Mapping[str, Any],
        batch: Callable[[int], Candidate],
        at_most: int,
        headroom: float,
        confidence: float,
    ) -> int:
        """The largest micro-batch size (samples) of a family that fits with that probability; 0 if none does."""
        described = self._describe(knobs)
        record = self._arms.get(described.arm)
        fits = min(at_most, 0 if record is None else record.fits(described.family))
        too_large = at_most + 1
        while too_large - fits > 1:
            size = (fits + too_large) // 2
            if self.probability_fits(batch(size), headroom) >= confidence:
                fits = size
            else:
                too_large = size
        return fits

    def bytes_per_sample(self, candidate: Candidate) -> float:
        """The most bytes that a sample may take, with 95 %."""
        described = self._describe(candidate.knobs)
        needed = self._allocations(described, candidate)
        # If the update is the peak, a sample seems to take nothing, but larger sizes do. So the backward pass
        # counts.
        both = (replace(needed, activations=0.0, kept_activations=0.0, pairs=0.0), needed)
        least, most = (self._predict(described, each, _BACKWARD).quantile(_HIGH) for each in both)
        return max(0.0, (most - least) / candidate.micro_batch_size)

    def _observe_peak(self, candidate: Candidate, memory: Memory) -> None:
        above = measured_above_initialize(memory)
        if above is None:
            return
        described = self._describe(candidate.knobs)
        self._tried.note(described.switches, switches_of(described.config), completed=True)
        needed = self._allocations(described, candidate)
        self._peaks(described).observe(self._moments(needed), described.arm, self._scale(needed), above / self._unit)
        record = self._arms.setdefault(described.arm, ArmRecord())
        record.measured += 1
        # At the edge: it has run, but a longer training of it may not.
        if not memory.was_short:
            if memory.available:
                taken = above + needed.limit_correction
                self._budget.observe_fit(described.arm, needed.initialize, min(memory.available), taken)
                self._budget.observe_unusable(described.arm, above, memory.unusable)
            largest = max(candidate.micro_batch_size, record.largest.get(described.family, 0))
            record.largest[described.family] = largest
        self._forget()

    def _observe_failure(self, candidate: Candidate) -> None:
        described = self._describe(candidate.knobs)
        self._tried.note(described.switches, switches_of(described.config), completed=False)
        needed = self._allocations(described, candidate)
        left = self._budget.left(described.arm, needed.initialize)
        if left is not None:
            mixture = self._predict(described, needed)
            limit = self._budget.limit(described.arm, left, headroom=0.0)
            self._budget.observe_failure(left, mixture.mean + needed.limit_correction, mixture.deviation)
            bound = (limit.mean - needed.limit_correction) / self._unit
            deviation = limit.deviation / self._unit
            self._peaks(described).observe_above(
                self._moments(needed), described.arm, self._scale(needed), bound, deviation
            )
        record = self._arms.setdefault(described.arm, ArmRecord())
        smallest = record.failed.get(described.family)
        if smallest is None or candidate.micro_batch_size < smallest[0]:
            record.failed[described.family] = candidate.micro_batch_size, needed
        self._forget()

    def _counted(self, described: Described, needed: Allocations) -> float:
        # The bytes that a candidate is expected to have allocated at its peak, as a limit counts them.
        return needed.initialize + self._predict(described, needed).mean + needed.limit_correction

    def _forget(self) -> None:
        self._known.clear()
        self._beside.clear()
        for record in self._arms.values():
            record.bound = None

    def _describe(self, knobs: Mapping[str, Any]) -> Described:
        key = json.dumps(knobs, sort_keys=True)
        described = self._described.get(key)
        if described is None:
            config = overwrite_deepspeed_config(self._base, knobs)
            # The same configuration may come from the user alone, or from knobs that repeat it.
            settings = ZeroSettings.of(config, self._profile.bytes_per_param)
            foreseen = nearest_arm(self._foreseen, config) if self._foreseen else None
            switches = self._switches_in(config)
            arm = (*arm_key(config, ()), *switches)
            switches = without_arm_like(switches, self._device)
            beside = Keeps.AS_MUCH if self._is_foreseen(foreseen, config) else keeps(switches, self._typed)
            family = json.dumps(config, sort_keys=True)
            described = Described(settings, arm, switches, family, foreseen, beside, config)
            self._described[key] = described
        return described

    def _is_foreseen(self, foreseen: ForeseenArm | None, config: Mapping[str, Any]) -> bool:
        seen = {} if foreseen is None else switches_of(foreseen.ds_config)
        others = self._unforeseen(config, seen) == self._unforeseen(self._base, seen)
        return foreseen is not None and others and switch_key(foreseen.ds_config) == switch_key(config, seen)

    def _unforeseen(self, config: Mapping[str, Any], seen: Collection[str]) -> Switches:
        switches = without_arm_like(self._switches_in(config), self._device)
        return tuple(each for each in switches if each[0] not in seen)

    def _switches_in(self, config: Mapping[str, Any]) -> Switches:
        coarse = (item for item in switches_of(config).items() if item[0] in self._coarse_switches)
        return tuple(sorted((place, repr(value)) for place, value in coarse))

    def _peaks(self, described: Described) -> PeakRegression:
        switches = described.switches
        if switches not in self._peaks_with:
            priors = other_priors(self._priors, described.keeps)
            self._peaks_with[switches] = PeakRegression(priors, self._shapes.arms, _NOISE_LEVELS[self._device])
        return self._peaks_with[switches]

    def _allocations(self, described: Described, candidate: Candidate) -> Allocations:
        needed = self._by_formula(described.settings, candidate)
        arm = described.foreseen
        if arm is None:
            return needed
        of_arm = self._by_formula(ZeroSettings.of(arm.ds_config, self._profile.bytes_per_param), candidate)
        return foreseen_allocations(arm, of_arm, needed, candidate.micro_batch_size)

    def _by_formula(self, settings: ZeroSettings, candidate: Candidate) -> Allocations:
        batch = candidate.micro_batch_size, candidate.gradient_accumulation_steps
        return allocations(settings, self._profiled, self._profile, self._slots, self._device, *batch)

    def _moments(self, needed: Allocations) -> tuple[_Moment, _Moment]:
        early_states, early_buffers = needed.states - needed.late_states, needed.buffers - needed.late_buffers
        last_buffers = needed.buffers - needed.passing_buffers
        unit = self._unit
        return (
            (1.0, needed.activations / unit, early_states / unit, early_buffers / unit, needed.pairs / unit, 0.0),
            (1.0, needed.kept_activations / unit, needed.states / unit, last_buffers / unit, 0.0, 1.0),
        )

    def _scale(self, needed: Allocations) -> float:
        moments = self._moments(needed)
        return max(sum(mean * part for mean, part in zip(self._means, moment, strict=True)) for moment in moments)

    def _predict(
        self, described: Described, needed: Allocations, moment: int | None = None, scatter: float = 1.0
    ) -> Mixture:
        # The bytes of the largest moment, or of the moment in one place, with a share of their scatter.
        peaks, scale = self._peaks(described), self._scale(needed)
        mixture = peaks.predict(self._moments(needed), described.arm, scale, moment, scatter)
        return Mixture(
            mixture.weights,
            tuple(mean * self._unit for mean in mixture.means),
            tuple(deviation * self._unit for deviation in mixture.deviations),
        )
