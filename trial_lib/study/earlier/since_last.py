"""The winner's throughput beside the last known one: both numbers, their difference, and the changes between."""

import statistics
import time
from collections.abc import Mapping, Sequence

from trial_lib.device.host.this_host import kind_of
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.result import TrialResult
from trial_lib.statistics.paired_ratios import Ratio
from trial_lib.statistics.study_ratios import ratio_between
from trial_lib.study.confirm.finding import Confirmed, Estimate
from trial_lib.study.earlier.earlier_studies import EarlierStudy, is_measured, levels_of
from trial_lib.study.earlier.fingerprint import Fingerprint

# The variation of one configuration from study to study (standard deviation, a share) while too few studies show it.
# Other programs use a processor's caches and a host's time, but seldom a GPU.
_GPU, _PROCESSOR_TIME, _CLOCK_ON_A_CPU = 0.01, 0.05, 0.10
_NEGLIGIBLE = 0.02  # A smaller change is not reported, however surely it is measured.


class SinceLast(FrozenRecord):
    """A study's winner beside that of the last study.

    Attributes:
        last_study_id: the last study.
        last_ended_at: when it ended, in seconds since the epoch.
        throughput: of the winner (samples/s), the median of its confirming trials.
        last_throughput: of the last study's winner, likewise.
        quantity: the compared quantity, in words.
        ratio: this throughput divided by the last one.
        changes: the changes of the experiment between the two studies.
    """

    last_study_id: str
    last_ended_at: float
    throughput: float
    last_throughput: float
    quantity: str
    ratio: Estimate
    changes: tuple[str, ...]

    @property
    def is_regression(self) -> bool:
        """Whether the throughput is below the last known one beyond the noise."""
        return self.ratio.high < 1.0 and self.ratio.value <= 1.0 - _NEGLIGIBLE

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        beside = "below" if self.is_regression else "beside"
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last_ended_at))
        return (
            f"{self.throughput:.4g} samples/s, {beside} the last known {self.last_throughput:.4g} samples/s "
            f"({self.last_study_id}, {day}): {self.ratio.times}, compared by {self.quantity}. {self._changes}"
        )

    @property
    def _changes(self) -> str:
        if not self.changes:
            return "ZeroTune knows of no change between them."
        return f"Changed between them: {'; '.join(self.changes)}."

    def document(self) -> dict[str, object]:
        """Returns it as JSON, with its sentence."""
        return {"sentence": self.sentence, "is_regression": self.is_regression, **self.model_dump(mode="json")}


def since_last(
    earlier: Sequence[EarlierStudy],
    fingerprint: Fingerprint,
    results: Mapping[int, TrialResult],
    winner: Confirmed,
    device: str,
) -> SinceLast | None:
    """Returns a winner beside that of the last study; None if there is no such study, or nothing to compare.

    On a CPU the processor time of a sample is compared, as in a confirmation. If the wall clock surely says something
    else, because the training waits, the wall clock is compared.

    Args:
        earlier: the earlier studies, oldest first.
        fingerprint: the experiment now.
        results: the study's trials.
        winner: the confirmed winner.
        device: `cuda` or `cpu`.
    """
    now = [results[number] for number in winner.trials if is_measured(results[number])]
    if not earlier or not now:
        return None
    *before, last = levels_of(earlier)
    histories = [now, list(last.best.trials), *(list(study.best.trials) for study in before)]
    ratio, quantity = _compare(histories, device)
    ours, theirs = (statistics.median(trial.metrics["throughput"] for trial in trials) for trials in histories[:2])
    return SinceLast(
        last_study_id=last.study_id,
        last_ended_at=last.ended_at,
        throughput=ours,
        last_throughput=theirs,
        quantity=quantity,
        ratio=Estimate(value=ratio.value, low=ratio.low, high=ratio.high),
        changes=tuple(fingerprint.changes_since(last.fingerprint)),
    )


def _compare(histories: Sequence[Sequence[TrialResult]], device: str) -> tuple[Ratio, str]:
    throughput = [[trial.metrics["throughput"] for trial in trials] for trials in histories]
    on_the_processor = kind_of(device).computes_on_the_processor
    by_clock = _ratio(throughput, _CLOCK_ON_A_CPU if on_the_processor else _GPU)
    times = [[trial.metrics.get("cpu_time_per_sample", 0.0) for trial in trials] for trials in histories]
    if not on_the_processor or not all(seconds > 0 for trials in times for seconds in trials):
        return by_clock, "throughput"
    by_time = _ratio([[1 / seconds for seconds in trials] for trials in times], _PROCESSOR_TIME)
    return (by_time, "processor time per sample") if by_time.overlaps(by_clock) else (by_clock, "throughput")


def _ratio(histories: Sequence[Sequence[float]], unknown: float) -> Ratio:
    now, last, *before = histories
    return ratio_between(now, last, before, unknown)
