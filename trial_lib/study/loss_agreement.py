"""Whether a candidate trains as the user's own configuration does, by the losses of the first optimizer steps. Pure.

A candidate of the same global batch and the same precision only does the same arithmetic elsewhere or in another
order. So its losses are the user's own but for rounding, which grows from step to step.

How much rounding may do: the unit roundoff of bfloat16 is 2**-8, 0.4 %, that of float32 2**-24, of TF32 2**-11;
`torch.testing.assert_close` takes 1.6 % for bfloat16. On a CPU in float32, ZeRO 0 to 3 with and without offload differ
by less than 2e-7 over ten steps (the recorded tables of `benchmarks/replay`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

from trial_lib.experiment.candidate import Candidate

_TOLERANCE = 1e-3  # of the first step's loss, where all is float32
_TOLERANCE_HALF = 2e-2  # ... where a part is bfloat16 or float16
_STEPS_GROWN = 10  # the tolerance grows by itself with each step, up to so many times
_HALF_PRECISION = ("bf16", "fp16", "amp", "torch_autocast")
# What else changes the numbers themselves, and not only where they are computed.
_OTHER_NUMBERS = (*_HALF_PRECISION, "data_types", "communication_data_type", "compression_training")
_QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_NOISE_WIDTH = 4.0  # standard errors
_SPREADS = 2.0  # times what the user's own repeats differ by, at most


class LossAgreement(BaseModel):
    """What the losses say.

    Attributes:
        is_compared: whether they were compared; they are not where the candidate is meant to change the training.
        agrees: False if they were compared and differ, or one is not finite.
        said: one sentence, with both numbers where they differ.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    is_compared: bool
    agrees: bool
    said: str


def changes_of_mathematics(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the settings by which one complete DeepSpeed configuration computes other numbers than another."""
    zero, own_zero = (config.get("zero_optimization") or {} for config in (other, own))
    changed = [key for key in _OTHER_NUMBERS if _said(other.get(key)) != _said(own.get(key))]
    return changed + [key for key in _QUANTISED if bool(zero.get(key)) != bool(own_zero.get(key))]


def _said(section: Any) -> Any:
    """Returns a section of a configuration; None for one that is not enabled."""
    return None if isinstance(section, Mapping) and not section.get("enabled", True) else section


def global_batch(candidate: Candidate) -> int:
    """Returns the samples of an optimizer step."""
    replicas = candidate.data_parallel_size or candidate.slots
    return candidate.micro_batch_size * candidate.gradient_accumulation_steps * replicas


def compare(
    own: tuple[Candidate, Mapping[str, Any], Sequence[Sequence[float]]],
    other: tuple[Candidate, Mapping[str, Any], Sequence[Sequence[float]]],
) -> LossAgreement:
    """Returns whether a candidate's losses agree with those of the user's own configuration.

    What a program draws at random (dropout, the order of its data) is drawn alike only where the micro-batches are
    alike. Where these differ and the first losses do too, the comparison is of the mean over the steps, with the noise
    that the losses show from batch to batch. A program without a seed differs from itself: what its repeats differ by
    is allowed for.

    Args:
        own: the candidate of the user's own configuration, the complete configuration, and the losses of each repeat
            from step 1 on.
        other: the same of the candidate.
    """
    (own_candidate, own_config, own_losses), (candidate, config, losses) = own, other
    if any(not math.isfinite(loss) for repeat in losses for loss in repeat):
        return LossAgreement(is_compared=True, agrees=False, said="a loss is not finite")
    changed = changes_of_mathematics(own_config, config)
    if global_batch(own_candidate) != global_batch(candidate):
        changed.append(f"train_batch_size ({global_batch(own_candidate)} -> {global_batch(candidate)})")
    if changed:
        said = f"the losses were not compared with yours: {', '.join(changed)} changes them"
        return LossAgreement(is_compared=False, agrees=True, said=said)
    steps = min((len(repeat) for repeat in (*own_losses, *losses)), default=0)
    if steps == 0:
        return LossAgreement(is_compared=False, agrees=True, said="the code shows no losses to compare")
    is_half = any(_said(config.get(key)) for key in _HALF_PRECISION)
    tolerance = _TOLERANCE_HALF if is_half else _TOLERANCE
    theirs, ours = ([[repeat[step] for repeat in repeats] for step in range(steps)] for repeats in (own_losses, losses))
    apart = _first_apart(theirs, ours, tolerance)
    if apart is None:
        return LossAgreement(is_compared=True, agrees=True, said=f"the losses of the first {steps} steps agree")
    draws_alike = (
        own_candidate.micro_batch_size == candidate.micro_batch_size
        and own_candidate.gradient_accumulation_steps == candidate.gradient_accumulation_steps
    )
    if not draws_alike and _means_agree(theirs, ours, tolerance):
        said = f"the losses of the first {steps} steps agree as far as their noise shows"
        return LossAgreement(is_compared=True, agrees=True, said=said)
    step, wanted, found = apart
    said = f"the loss of step {step} is {found:.6g}, with your own configuration {wanted:.6g}"
    return LossAgreement(is_compared=True, agrees=False, said=said)


def _first_apart(
    theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]], tolerance: float
) -> tuple[int, float, float] | None:
    """Returns the first step, from 1, whose losses differ by more than they may, with both means; None for none."""
    spread = max(max(repeats) - min(repeats) for repeats in theirs)
    for step, (wanted, found) in enumerate(zip(theirs, ours, strict=True), 1):
        mine, other = statistics.fmean(wanted), statistics.fmean(found)
        grown = tolerance * min(step, _STEPS_GROWN) * max(abs(mine), abs(other))
        if abs(mine - other) > grown + _SPREADS * spread:
            return step, mine, other
    return None


def _means_agree(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]], tolerance: float) -> bool:
    """Returns whether two courses of losses on different draws are of one training, as far as their noise shows."""
    mine, other = ([statistics.fmean(step) for step in course] for course in (theirs, ours))
    if len(mine) < 3:
        return True
    mean, found = statistics.fmean(mine), statistics.fmean(other)
    noise = _noise(mine) + _noise(other)
    return abs(mean - found) <= tolerance * max(abs(mean), abs(found)) + _NOISE_WIDTH * math.sqrt(noise / len(mine))


def _noise(course: Sequence[float]) -> float:
    """Returns the variance of a loss from batch to batch, by its steps' differences: a trend counts little in them."""
    return statistics.fmean((after - before) ** 2 for before, after in pairwise(course)) / 2.0
