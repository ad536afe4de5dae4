"""Whether a candidate trains as the user's configuration does, by the losses of the first optimizer steps. Pure.

A candidate of the same global batch and the same precision does the same arithmetic in another place or order. Its
losses differ from the user's for four reasons only. Rounding differs, and grows from step to step. The program draws
random numbers. The program multiplies its loss by a factor. The candidate starts from other initial weights.

Rounding is bounded as follows. The unit roundoff of bfloat16 is 2**-8, 0.4 %, that of float32 2**-24, of TF32 2**-11,
an eighth of bfloat16's; `torch.testing.assert_close` takes 1.6 % for bfloat16. On a CPU in float32, ZeRO 0 to 3 with
and without offload differ by less than 2e-7 over ten steps (the recorded tables of `benchmarks/replay`).
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord
from zerotune.trial_lib.records.switches import switches_of

_TOLERANCE = 1e-3  # of the first step's loss, if all is float32
_TOLERANCE_HALF = 2e-2  # ... if a part is bfloat16, float16, or narrower
_TOLERANCE_TF32 = _TOLERANCE_HALF / 8  # ... if matrices are multiplied in TF32, and all else is float32
_STEPS_GROWN = 10  # each step adds the tolerance once, up to this many times
_HALF_PRECISION = ("bf16", "fp16", "amp", "torch_autocast")
_WIDE = ("float32", "float64", "tf32")
# Other settings that change the numbers, and not only where they are computed.
_OTHER_NUMBERS = (*_HALF_PRECISION, "data_types", "communication_data_type", "compression_training")
_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_UPDATED_LATER = ("zenflow",)
_NOISE_WIDTH = 4.0  # standard errors
_SPREADS = 2.0  # at most this many times the difference between repeats of the user's configuration
# Powers of the ratio of two accumulations by which a program's losses may change. A sum over samples, a missing
# division and a doubled division count one each.
_POWERS = (0, 1, -1, 2, -2)
# The largest ratio of the losses of two draws of initial weights, before any update. Draws of networks with a hidden
# layer reached 1.9. An initialisation without an effect on partitioned parameters may reach ten.
_MOST_APART = 3.0
_SAME_WEIGHTS = 1e-6  # of their norm, because the same numbers are added in another order


class LossAgreement(FrozenRecord):
    """The comparison of two configurations by their losses."""

    is_compared: bool  # whether they were compared. They are not if the candidate is meant to change the training.
    agrees: bool  # False if they were compared and differ, or if a loss is not finite
    sentence: str  # one or two sentences, with both numbers if they differ


@dataclass(frozen=True)
class LossCourse:
    """The losses of a configuration."""

    candidate: Candidate  # the configuration
    config: Mapping[str, Any]  # the complete DeepSpeed configuration
    losses: Sequence[Sequence[float]]  # of each repeat, from step 1 on
    # Of each repeat, numbers that identify its initial weights; empty if unknown
    weights: Sequence[Sequence[float]] = ()
    # The number formats that the program keeps its model in and computes in, by its code and by the user's
    # configuration, as in `ProgramProfile`
    formats: Collection[str] = ()
    skipped: Sequence[Sequence[int]] = ()  # of each repeat, the steps that changed no weight, from 1 on
    free: Collection[str] = ()  # places of the program's switches that may change the training, as the user says

    def first(self, steps: int) -> "_Steps":
        return [[repeat[step] for repeat in self.losses] for step in range(steps)]

    def updates_before(self, steps: int) -> list[list[int]]:
        """For each repeat the number of weight updates before each of the first steps."""
        numbers = range(1, steps + 1)
        skips = self.skipped or [()] * len(self.losses)
        return [[number - 1 - sum(each < number for each in skipped) for number in numbers] for skipped in skips]

    def by_updates(self) -> "_Steps":
        """The losses after no update, one update, and so on. Of a repeated step the last one counts."""
        updates = self.updates_before(min(map(len, self.losses)))
        kept = [dict(zip(counts, losses, strict=False)) for counts, losses in zip(updates, self.losses, strict=True)]
        return [[repeat[count] for repeat in kept] for count in range(min(map(len, kept)))]


# The losses of each step, of all repeats.
_Steps = Sequence[Sequence[float]]


def changes_of_mathematics(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings by which one complete DeepSpeed configuration computes other numbers than another."""
    zero, own_zero = (config.get("zero_optimization") or {} for config in (other, own))
    changed = [key for key in _OTHER_NUMBERS if _enabled(other.get(key)) != _enabled(own.get(key))]
    changed += [key for key in _QUANTISED if bool(zero.get(key)) != bool(own_zero.get(key))]
    return changed + [key for key in _UPDATED_LATER if zero.get(key) != own_zero.get(key)]


def _enabled(section: Any) -> Any:
    # A section of a configuration; None if it is not enabled.
    return None if isinstance(section, Mapping) and not section.get("enabled", True) else section


def global_batch(candidate: Candidate) -> int:
    """The samples of an optimizer step."""
    replicas = candidate.data_parallel_size or candidate.slots
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps * replicas


def cuts_alike(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates cut the batch of an optimizer step alike, and so draw the same random numbers."""
    return (one.micro_batch_size, one.gradient_accumulation_steps) == (
        other.micro_batch_size,
        other.gradient_accumulation_steps,
    )


def compare(own: LossCourse, other: LossCourse) -> LossAgreement:
    """Returns whether a candidate's losses agree with those of the user's configuration.

    A program draws the same random numbers (dropout, the order of its data) only if the micro-batches are alike. If
    they are not and the first losses differ, the means over the steps are compared, with the noise of the losses from
    batch to batch. A program without a seed differs from itself, so the difference between its repeats is allowed.

    Some programs divide their losses by the accumulation once too often or not at all, or sum over the samples of a
    micro-batch. Then the losses change by one factor at every step, even before the first update. The candidate does
    not cause that, so the losses are compared without the factor.

    Initial weights may depend on the candidate, as within `deepspeed.zero.Init`, or be drawn again in each trial. Then
    the means are compared, and the difference of the losses of step 1 is allowed. One start may also learn up to twice
    as fast as the other, which still shows a program that learns nothing. If the losses of step 1 are further apart
    than two draws of one initialisation can be, they are of different trainings. The program's own initialisation may
    have had no effect.

    In fp16 the loss scaling may skip other steps, so that the same data meet weights of more or fewer updates. Up to
    that step the losses are compared one by one. From there the losses after equal numbers of updates are compared,
    with their noise.
    """
    if any(not math.isfinite(loss) for repeat in other.losses for loss in repeat):
        return _differ("a loss is not finite")
    switches, others = switches_of(own.config), switches_of(other.config)
    changed = changes_of_mathematics(own.config, other.config)
    changed += [place for place in other.free if switches.get(place) != others.get(place)]
    batches = global_batch(own.candidate), global_batch(other.candidate)
    if batches[0] != batches[1]:
        changed.append(f"train_batch_size ({batches[0]} -> {batches[1]})")
    if changed:
        sentence = f"the losses were not compared with yours: {', '.join(changed)} changes them"
        return LossAgreement(is_compared=False, agrees=True, sentence=sentence)
    steps = min((len(repeat) for repeat in (*own.losses, *other.losses)), default=0)
    if steps == 0:
        return LossAgreement(is_compared=False, agrees=True, sentence="the code shows no losses to compare")
    tolerance = _tolerance(other)
    # So many of the first steps had equal numbers of updates before them, in all repeats of both.
    counts = zip(*own.updates_before(steps), *other.updates_before(steps), strict=True)
    alike = sum(1 for _ in itertools.takewhile(lambda updates: len(set(updates)) == 1, counts))
    theirs, ours = own.first(alike), other.first(alike)
    drawn = theirs, ours
    if alike < steps:
        common = min(len(own.by_updates()), len(other.by_updates()))
        drawn = own.by_updates()[:common], other.by_updates()[:common]
    if not _start_alike((*own.weights, *other.weights)):
        return _from_other_weights(own, other, tolerance, *drawn)
    # Step by step, as they are and without the program's own factor.
    factors = list(dict.fromkeys((1.0, _factor(own.candidate, other.candidate, theirs[0], ours[0]))))
    apart = [_first_apart(_times(theirs, factor), ours, tolerance) for factor in factors]
    if None in apart:
        factor = factors[apart.index(None)]
        sentence = f"the losses of the first {alike} steps agree"
        if alike == steps:
            return _agree(sentence, factor)
        sentence += "; then the loss scaling skips other steps, and those after as many updates"
        if _means_agree(_times(drawn[0], factor), drawn[1], tolerance):
            return _agree(f"{sentence} agree as far as their noise shows", factor)
        return _differ(f"{sentence} do not agree")
    # Other random numbers: the means, with their noise.
    is_cut_alike = cuts_alike(own.candidate, other.candidate)
    for factor in factors if not is_cut_alike else ():
        expected = _times(drawn[0], factor)
        if _means_agree(expected, drawn[1], tolerance) and (factor == 1.0 or _step_agrees(expected, drawn[1])):
            return _agree(f"the losses of the first {steps} steps agree as far as their noise shows", factor)
    step, wanted, found = max(filter(None, apart), key=lambda each: each[0])
    sentence = f"the loss of step {step} is {found:.6g}, with your configuration {wanted:.6g}"
    if step == 1 and not is_cut_alike:
        sentence += ", before any update: the loss depends on the micro-batch itself"
    elif factors[-1] != 1.0 and step > 1:
        sentence += f" (times {factors[-1]:.3g}, by which the program's own way to accumulate changes it)"
    return _differ(sentence)


def _tolerance(course: LossCourse) -> float:
    # The largest share of a loss that rounding may change. The code may round more than the configuration.
    narrow = any(each not in _WIDE for each in course.formats)
    if narrow or any(_enabled(course.config.get(key)) for key in _HALF_PRECISION):
        return _TOLERANCE_HALF
    return _TOLERANCE_TF32 if "tf32" in course.formats else _TOLERANCE


def _from_other_weights(
    own: LossCourse, other: LossCourse, tolerance: float, theirs: _Steps, ours: _Steps
) -> LossAgreement:
    factor = _factor(own.candidate, other.candidate, theirs[0], ours[0])
    expected = _times(theirs, factor)
    gap = abs(fmean(expected[0]) - fmean(ours[0]))
    faster = max(_learnt(expected), _learnt(ours)) / 2.0
    if _start_alike(own.weights) and _start_alike(other.weights):
        sentence = "the program's initial weights are others than with your configuration"
    else:
        sentence = "the program draws other initial weights in each trial"
    sentence += f" (loss {fmean(ours[0]):.6g} at step 1, with your configuration {fmean(theirs[0]):.6g})"
    larger, smaller = sorted((abs(fmean(expected[0])), abs(fmean(ours[0]))), reverse=True)
    if larger > _MOST_APART * smaller and gap > _noise_of_a_step(expected, ours):
        return _differ(f"{sentence}: that far apart they are no draws of one initialisation")
    if _means_agree(expected, ours, tolerance, gap + faster):
        return _agree(
            f"{sentence}; from there the losses of {len(ours)} steps agree as far as their noise shows", factor
        )
    return _differ(f"{sentence}, and from there the losses of {len(ours)} steps do not agree")


def _learnt(course: _Steps) -> float:
    # The mean change of the losses since step 1.
    return abs(fmean(fmean(step) for step in course) - fmean(course[0]))


def _agree(sentence: str, factor: float) -> LossAgreement:
    if factor != 1.0:
        sentence += (
            f", but for the factor {factor:.3g}, which the program gives them by its own way to accumulate. Its "
            "gradients have it too: Adam passes over that, plain SGD and clipping do not"
        )
    return LossAgreement(is_compared=True, agrees=True, sentence=sentence)


def _differ(sentence: str) -> LossAgreement:
    return LossAgreement(is_compared=True, agrees=False, sentence=sentence)


def _start_alike(weights: Sequence[Sequence[float]]) -> bool:
    if not weights or not all(weights):
        return True
    first, first_square = weights[0]
    return all(abs(value - first) <= _SAME_WEIGHTS * math.sqrt(max(square, first_square)) for value, square in weights)


def _factor(own: Candidate, candidate: Candidate, theirs: Sequence[float], ours: Sequence[float]) -> float:
    # The factor by which the program's losses change with the accumulation, from step 1.
    ratio = candidate.gradient_accumulation_steps / own.gradient_accumulation_steps
    wanted, found = fmean(theirs), fmean(ours)
    factors = [ratio**power for power in _POWERS]
    return min(factors, key=lambda factor: abs(factor * wanted - found) / max(abs(factor * wanted), abs(found), 1e-300))


def _times(course: _Steps, factor: float) -> _Steps:
    return [[factor * loss for loss in repeats] for repeats in course]


def _first_apart(theirs: _Steps, ours: _Steps, tolerance: float) -> tuple[int, float, float] | None:
    # The first step, from 1, whose losses differ by more than the tolerance, with both means; or None.
    # Both have trained on the same samples in a round, and on others in the next.
    gaps = [[b - a for a, b in zip(*pair, strict=False)] for pair in zip(theirs, ours, strict=True)]
    spread = max(max(gap) - min(gap) for gap in gaps)
    for step, (wanted, found) in enumerate(zip(theirs, ours, strict=True), 1):
        mine, other = fmean(wanted), fmean(found)
        grown = tolerance * min(step, _STEPS_GROWN) * max(abs(mine), abs(other))
        if abs(mine - other) > grown + _SPREADS * spread:
            return step, mine, other
    return None


def _means_agree(theirs: _Steps, ours: _Steps, tolerance: float, gap: float = 0.0) -> bool:
    """Whether two courses with different random numbers agree within their noise, rounding, and a further gap."""
    mine, other = ([fmean(step) for step in course] for course in (theirs, ours))
    if len(mine) < 3:
        return True
    mean, found = fmean(mine), fmean(other)
    noise = _noise(mine) + _noise(other)
    return (
        abs(mean - found) <= tolerance * max(abs(mean), abs(found)) + _NOISE_WIDTH * math.sqrt(noise / len(mine)) + gap
    )


def _step_agrees(theirs: _Steps, ours: _Steps) -> bool:
    # Whether the losses of step 1 differ by no more than those of two batches.
    if len(theirs) < 3:
        return False
    return abs(fmean(theirs[0]) - fmean(ours[0])) <= _noise_of_a_step(theirs, ours)


def _noise_of_a_step(theirs: _Steps, ours: _Steps) -> float:
    mine, other = ([fmean(step) for step in course] for course in (theirs, ours))
    return _NOISE_WIDTH * math.sqrt(_noise(mine) + _noise(other)) if len(mine) > 1 else math.inf


def _noise(course: Sequence[float]) -> float:
    # The variance of a loss from batch to batch, from differences between steps. A trend matters little.
    return fmean((after - before) ** 2 for before, after in itertools.pairwise(course)) / 2.0
