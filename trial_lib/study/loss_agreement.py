"""Whether a candidate trains as the user's configuration does, by the first optimizer steps. Pure.

A candidate of the same global batch and the same precision does the same arithmetic in another place or order. It is
compared with the user's configuration on the same samples: the losses of the first steps, the norms of the gradients,
and by module the gradients and the change of the weights (`weight_changes.py`). They differ for four reasons only.
Rounding differs. The program draws random numbers. The program multiplies its loss by a factor. The candidate starts
from other initial weights.

Rounding is measured: one trial of the user's configuration rounds otherwise. Without such a trial it is estimated from
the unit roundoff u. A loss has that error itself. Adam turns about a share of 2u of the weights the other way, so that
their change, and with it that of the loss, differs by a share of about 2 sqrt(u).
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zerotune.trial_lib.messages.turned import beside_kind
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.switches import switches_of
from zerotune.trial_lib.study.weight_changes import FirstUpdates, WeightVerdict, far_apart, judge, roundoff, shown

# Settings that change the numbers, and not only where they are computed.
_OTHER_NUMBERS = (
    *("bf16", "fp16", "amp", "torch_autocast"),
    *("data_types", "communication_data_type", "compression_training"),
)
_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_UPDATED_LATER = ("zenflow",)
_NOISE_WIDTH = 4.0  # standard errors
_SPREADS = 2.0  # at most this many times the range of the differences over the rounds
_OF_SUM = 2.0**-20  # of a loss that is summed in 32 bits, in some sixteen operations that round
_OF_ONE = 3.0  # times the spread of a single pair, as in `weight_changes.py`
# Powers of the ratio of two accumulations by which a program's losses may change. A sum over samples, a missing
# division and a doubled division count one each.
_POWERS = (0, 1, -1, 2, -2)
# The largest ratio of the losses of two draws of initial weights, before any update. Draws of networks with a hidden
# layer reached 1.9. An initialisation without an effect on partitioned parameters may reach ten.
_MOST_APART = 3.0
_SAME_WEIGHTS = 1e-6  # of their norm, because the same numbers are added in another order


class LossAgreement(FrozenRecord):
    """The comparison of two configurations by their first steps."""

    is_compared: bool  # whether they were compared. They are not if the candidate is meant to change the training.
    agrees: bool  # False if they were compared and differ, or if a loss is not finite
    sentence: str  # with both numbers if they differ, and else with the difference that would have been seen
    # The shares by which the change of all weights, or of one module's, would have had to differ. None if the weights
    # were not compared.
    seen: tuple[float, float] | None = None


@dataclass(frozen=True)
class LossCourse:
    """The first steps of a configuration, in rounds whose samples are those of the other one's."""

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
    updates: Sequence[FirstUpdates] = ()  # of each repeat
    generates: bool = False  # whether the program trains on what its model generates, and so on samples of its own

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


def compare(own: LossCourse, other: LossCourse, again: tuple[TrialResult, TrialResult] | None = None) -> LossAgreement:
    """Returns whether a candidate trains as the user's configuration does.

    `again`: two trials of the user's configuration on the same samples, of which the second rounds otherwise. What may
    differ in a training that is the same stands in docs/how_it_works.md, "How losses are compared": random draws where
    the cut differs, a factor of the program's own, other initial weights, and other steps that fp16's loss scaling
    skips. Where losses cannot be compared one by one their means are, with the noise from batch to batch.
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
    tolerance = _Tolerance.of(own, other, again)
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
    factors = list(dict.fromkeys((1.0, _factor(_step_ratios(own, other), theirs[0], ours[0]))))
    apart = [_first_apart(_times(theirs, factor), ours, tolerance) for factor in factors]
    if None in apart:
        factor = factors[apart.index(None)]
        sentence = f"the losses of the first {alike} steps agree"
        if alike == steps:
            return _weighed(own, other, again, _agree(sentence, factor), factor)
        sentence += "; then the loss scaling skips other steps, and those after as many updates"
        if _means_agree(_times(drawn[0], factor), drawn[1], tolerance):
            return _sized(own, other, _agree(f"{sentence} agree as far as their noise shows", factor))
        return _differ(f"{sentence} do not agree")
    # Other random numbers: the means, with their noise.
    is_cut_alike = cuts_alike(own.candidate, other.candidate) and not own.generates
    for factor in factors if not is_cut_alike else ():
        expected = _times(drawn[0], factor)
        if _means_agree(expected, drawn[1], tolerance) and (factor == 1.0 or _step_agrees(expected, drawn[1])):
            agreed = _agree(f"the losses of the first {steps} steps agree as far as their noise shows", factor)
            return _weighed(own, other, again, agreed, factor)
    step, wanted, found = max(filter(None, apart), key=lambda each: each[0])
    sentence = f"the loss of step {step} is {found:.6g}, with your configuration {wanted:.6g}"
    if step == 1 and not is_cut_alike:
        sentence += ", before any update: the loss depends on the micro-batch itself"
    elif factors[-1] != 1.0 and step > 1:
        sentence += f" (times {factors[-1]:.3g}, by which the program's own way to accumulate changes it)"
    return _differ(sentence)


@dataclass(frozen=True)
class _Tolerance:
    # How far losses may be apart that only rounding and random numbers make differ

    share: float  # of the loss itself
    of_change: float  # of the largest change since step 1
    spread: float  # beside these

    @classmethod
    def of(cls, own: LossCourse, other: LossCourse, again: tuple[TrialResult, TrialResult] | None) -> "_Tolerance":
        unit = roundoff(other.config, other.formats)
        share = 2.0 * unit + _OF_SUM
        if again is None or not all(each.losses for each in again):
            return cls(share, 2.0 * math.sqrt(unit), 0.0)
        factor = _cut_factor(again, own, other) or 1.0
        squares = [(b - factor * a) ** 2 for a, b in zip(*(each.losses for each in again), strict=False)]
        slack = judge(own.updates, other.updates, None, unit).slack
        return cls(share, slack, _OF_ONE * math.sqrt(fmean(squares)))

    def at(self, course: Sequence[float]) -> float:
        """For the last of these losses."""
        return (
            self.share * abs(course[-1]) + self.of_change * max(abs(loss - course[0]) for loss in course) + self.spread
        )


def _weighed(
    own: LossCourse,
    other: LossCourse,
    again: tuple[TrialResult, TrialResult] | None,
    agreed: LossAgreement,
    factor: float,
) -> LossAgreement:
    # Adds the judgement of gradients and weights to losses that agree.
    if own.generates:
        sentence = f"{agreed.sentence}; each trains on what it generates, so of the change of the weights only the size"
        return _sized(own, other, agreed.model_copy(update={"sentence": f"{sentence} was compared"}))
    pair = None if again is None else (FirstUpdates.of(again[0]), FirstUpdates.of(again[1]))
    cut_factor = None if again is None else _cut_factor(again, own, other)
    found = judge(own.updates, other.updates, pair, roundoff(other.config, other.formats), factor, cut_factor)
    if found.fault:
        return _differ(f"{agreed.sentence}, but {found.fault}")
    sentence = f"{agreed.sentence}; {_power(own, other, found)}"
    if found.updates and cut_factor is not None:
        sentence += " (measured with your configuration, of which one trial had another micro-batch)"
    return agreed.model_copy(update={"sentence": sentence, "seen": found.seen if found.updates else None})


def _cut_factor(again: tuple[TrialResult, TrialResult], own: LossCourse, other: LossCourse) -> float | None:
    # The program's own factor, if the second trial cuts the batch otherwise; None if it cuts as yours does.
    if again[0].config_hash == again[1].config_hash:
        return None
    first, sizes = [each.losses[:1] for each in again], [each.micro_batch_arrived or 0 for each in again]
    # It may be cut in a third way.
    ratios = [sizes[0] / sizes[1]] if all(sizes) else _step_ratios(own, other)
    return _factor(ratios, *first) if all(first) else 1.0


def _power(own: LossCourse, other: LossCourse, found: WeightVerdict) -> str:
    if found.updates:
        agree = f"the gradients and the change of the weights after {found.updates} updates agree too"
        whole, module = found.seen
        if whole >= 1.0:
            return (
                f"{agree} as far as noise shows: a difference of {shown(found.size)} in its size would have been seen"
            )
        difference = f"a difference of {shown(whole)} in that change would have been seen"
        return f"{agree}: {difference}, and of {shown(module)} in that of one module"
    steps = min(len(repeat) for repeat in (*own.losses, *other.losses))
    theirs = own.first(steps)
    stands = [[theirs[0][place] for place in range(len(own.losses))]] * steps
    seen = _first_apart(theirs, stands, _Tolerance.of(own, other, None))
    shows = "would" if seen else "would not"
    return (
        f"the change of the weights was not compared, because {found.why}, and the losses {shows} show a training that "
        "learns nothing"
    )


def _sized(own: LossCourse, other: LossCourse, agreed: LossAgreement) -> LossAgreement:
    # From other weights, or on other samples, only the size of the change can be compared.
    fault = far_apart(own.updates, other.updates)
    return _differ(f"{agreed.sentence}, but {fault}") if fault else agreed


def _from_other_weights(
    own: LossCourse, other: LossCourse, tolerance: _Tolerance, theirs: _Steps, ours: _Steps
) -> LossAgreement:
    factor = _factor(_step_ratios(own, other), theirs[0], ours[0])
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
        sentence += f"; from there the losses of {len(ours)} steps agree as far as their noise shows"
        return _sized(own, other, _agree(sentence, factor))
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


def _step_ratios(own: LossCourse, other: LossCourse) -> list[float]:
    steps = [one.candidate.gradient_accumulation_steps for one in (other, own)]
    # Lightning and DeepSpeed both divide by the accumulation. Without DeepSpeed one of them does.
    return [steps[0] / steps[1], *(steps if beside_kind(other.candidate.switches) else ())]


def _factor(ratios: Sequence[float], theirs: Sequence[float], ours: Sequence[float]) -> float:
    # The factor by which the program's losses change with the accumulation, in one of these ratios, from step 1.
    wanted, found = fmean(theirs), fmean(ours)
    factors = [ratio**power for ratio in ratios for power in _POWERS]
    return min(factors, key=lambda factor: abs(factor * wanted - found) / max(abs(factor * wanted), abs(found), 1e-300))


def _times(course: _Steps, factor: float) -> _Steps:
    return [[factor * loss for loss in repeats] for repeats in course]


def _first_apart(theirs: _Steps, ours: _Steps, tolerance: _Tolerance) -> tuple[int, float, float] | None:
    # The first step, from 1, whose losses differ by more than the tolerance, with both means; or None.
    # Both have trained on the same samples in a round, and on others in the next.
    course: list[float] = []
    gaps = [[b - a for a, b in zip(*pair, strict=False)] for pair in zip(theirs, ours, strict=True)]
    spread = max(max(gap) - min(gap) for gap in gaps)
    for step, (wanted, found) in enumerate(zip(theirs, ours, strict=True), 1):
        mine, other = fmean(wanted), fmean(found)
        course.append(mine)
        if abs(mine - other) > tolerance.at(course) + _SPREADS * spread:
            return step, mine, other
    return None


def _means_agree(theirs: _Steps, ours: _Steps, tolerance: _Tolerance, gap: float = 0.0) -> bool:
    """Whether two courses with different random numbers agree within their noise, rounding, and a further gap."""
    mine, other = ([fmean(step) for step in course] for course in (theirs, ours))
    if len(mine) < 3:
        return True
    noise = _NOISE_WIDTH * math.sqrt((_noise(mine) + _noise(other)) / len(mine))
    return abs(fmean(mine) - fmean(other)) <= tolerance.at(mine) + noise + gap


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
