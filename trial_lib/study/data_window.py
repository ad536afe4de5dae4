"""The samples of a confirmation: how many each trial counts, and where in the data each round begins. Pure.

All contenders of a round train on the same samples, and each round has other ones. So the rounds differ as parts of the
data do, and the interval of a gain contains the data. A longer window makes rounds more alike, and costs seconds.
"""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.measurement import TRACE
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.units import quantity
from zerotune.trial_lib.study.loss_agreement import global_batch

# Steps of the user's batch. A shorter window lies within one bucket of a sampler that sorts by length, and intervals
# then miss the gain of the epoch (`python -m benchmarks.confirm_aa.data`).
_LEAST_STEPS = 16
# What a process differs from another, as a share. Where data vary no more than that, a longer window brings nothing.
_BETWEEN_PROCESSES = 0.05
# Reading as much of a stream as is trained on in this time takes no longer.
_STREAM_S = 2.0
_PATIENCE = 5.0  # of the deadline, as `plans.deadline_s` has it
_LONG_STEP = 1.5  # times the median: it may be one that logs, validates or saves
_LEAST_PERIODS = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


def offset_of_round(seed: int, number: int) -> float:
    """The share of an epoch that comes before a round's data. Any number of rounds is spread evenly over the epoch.

    The first round (0) begins at a place that is drawn from the study's seed.
    """
    return (random.Random(f"data {seed}").random() + number * _GOLDEN) % 1.0


@dataclass(frozen=True)
class DataWindow:
    """What the trials of one heat count. Without `samples` each counts as many as a trial of the search."""

    samples: int = 0  # over all ranks
    largest_batch: int = 0  # global, of the contenders
    throughput: float = 0.0  # of the fastest contender, in samples/s
    slowest: float = 0.0  # likewise

    @classmethod
    def of(cls, readings: Sequence[tuple[Candidate, TrialResult]], varies: bool, round_s: float) -> "DataWindow":
        """The window for these contenders, of which the first is the user's configuration if that completed.

        Args:
            varies: whether the profile has seen samples of different lengths.
            round_s: the seconds that a round may take.
        """
        batches = [global_batch(candidate) for candidate, _ in readings]
        results = [result for _, result in readings]
        speeds = [result.metrics.get("throughput", 0.0) for result in results]
        none = cls(0, max(batches), max(speeds), min(speeds))
        repeats = max(map(_period, results)) if len(set(batches)) == 1 else 0
        varies = varies or any(result.metrics.get("data_spread", 0.0) > 0.0 for result in results)
        if not (varies or repeats) or not all(speeds):
            return none
        seconds = sum(1 / speed for speed in speeds)
        affordable = (round_s - sum(map(_before, results))) / seconds
        wanted = max(batch * _steps_wanted(result) for batch, result in zip(batches, results, strict=True))
        least = max(StepWindow().min_steps * max(batches), min(_LEAST_STEPS * batches[0], affordable))
        samples, together = max(least, min(wanted, affordable)), math.lcm(*batches)
        whole = max(1, repeats) * (together if together <= samples else max(batches))
        return replace(none, samples=math.ceil(samples / whole) * whole)

    def more_seconds(self, result: TrialResult) -> float:
        """What a trial takes longer than this reading of its configuration did."""
        throughput = result.metrics.get("throughput")
        return max(0.0, self.samples / throughput - sum(result.step_times)) if self.samples and throughput else 0.0

    def in_round(self, plan: TrialPlan, seed: int, number: int) -> TrialPlan:
        """The plan of a confirming trial of a round, whose data begin as `offset_of_round` says."""
        share = offset_of_round(seed, number)
        replicas = plan.candidate.data_parallel_size or plan.candidate.slots
        # Whole steps, so that all batches of a batch sampler begin there.
        step = max(1, self.largest_batch // replicas)
        steps = int(share * _STREAM_S * self.throughput / replicas / step)
        moved = replace(plan, data_offset=share, stream_offset=steps * step, data_step=step)
        if not self.samples:
            return moved
        batch = global_batch(plan.candidate)
        # All begin to count at the same sample. A smaller batch warms up in more steps.
        start = 1 + round((plan.window.start_step - 1) * self.largest_batch / batch)
        steps = max(1, round(self.samples / batch))
        # A program may be shorter than that, and ends at the same sample for all.
        least = plan.window.min_steps
        window = replace(plan.window, start_step=start, end_step=start + steps - 1, max_steps=steps, least_steps=least)
        more = _PATIENCE * (window.end_step - plan.window.end_step) * batch / self.slowest
        return replace(moved, window=window, deadline_s=plan.deadline_s + max(0.0, more))

    def note(self, results: Sequence[TrialResult]) -> str:
        """A sentence on the data of these confirming trials of one configuration; empty without any."""
        counted = [result for result in results if result.metrics.get("measured_steps")]
        if not counted:
            return ""
        samples, last = round(max(map(_samples, counted))), counted[-1]
        is_stream = last.data_places is None
        read = max(result.data_offset or 0 for result in counted)
        if any(result.data_offset is None for result in counted) or (is_stream and not read):
            return (
                "The program's data could not be moved, so every round trained on the first ones. The gain holds for "
                f"its first {samples:,} samples."
            )
        where = "each round trained on other samples of the data"
        if is_stream:
            where = (
                f"a round began among the first {read:,} that a rank reads of a stream. So rounds may share samples, "
                "and the gain holds for these first ones"
            )
        if not self.samples:
            return f"{where[0].upper()}{where[1:]}."
        took = quantity(statistics.fmean(sum(result.step_times) for result in counted), "s")
        return (
            f"Steps differ with their data. So all trials of a round counted the same {samples:,} samples ({took} of "
            f"yours), and {where}."
        )


def _samples(result: TrialResult) -> float:
    return result.metrics["throughput"] * result.metrics["latency"] * result.metrics["measured_steps"]


def _before(result: TrialResult) -> float:
    # The seconds of a trial without its counted steps and its trace.
    seconds = sum(each for phase, each in result.phases.items() if phase != TRACE)
    return max(0.0, seconds - sum(result.step_times))


def _steps_wanted(result: TrialResult) -> float:
    # The number with which rounds of a given time say most: the best size of clusters, whose variances and costs are
    # known (Cochran, Sampling Techniques, 10.6).
    times = result.step_times
    spread = statistics.stdev(times) / statistics.fmean(times) if len(times) > 1 else 0.0
    spread = max(spread, result.metrics.get("data_spread", 0.0))
    return spread / _BETWEEN_PROCESSES * math.sqrt(_before(result) / result.metrics["latency"])


def _period(result: TrialResult) -> int:
    # The steps from one long step to the next, if they come at regular intervals; 0 if they do not.
    if len(result.step_times) < 2 * _LEAST_PERIODS:
        return 0
    usual = statistics.median(result.step_times)
    long = [place for place, seconds in enumerate(result.step_times) if seconds > _LONG_STEP * usual]
    apart = {later - earlier for earlier, later in itertools.pairwise(long)}
    return apart.pop() if len(long) >= _LEAST_PERIODS and len(apart) == 1 else 0
