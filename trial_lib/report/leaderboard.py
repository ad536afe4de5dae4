"""The trials of a study as rows, best first."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from trial_lib.command.switches import PROGRAM, shown_switch
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.units import bytes_shown
from trial_lib.space.candidate_names import CandidateNames


class LeaderboardRow(FrozenRecord):
    """One trial.

    Attributes:
        trial: its number.
        purpose: why it ran.
        label: its name for people, such as `z2-mbs16`.
        micro_batch_size: samples a rank took in one forward pass.
        measured: `fresh` in new processes, `swept` in processes that had measured other micro-batch sizes before.
        outcome: how it ended.
        reason: one sentence. Empty if it completed.
        metric: the name of the optimised metric.
        value: its value. None if the trial did not complete.
        throughput: samples/s over all ranks.
        peak_memory: bytes, of the rank that needed most.
        knobs: its settings other than the batch.
    """

    trial: int
    purpose: Purpose
    label: str
    micro_batch_size: int
    measured: Literal["fresh", "swept"]
    outcome: Outcome
    reason: str
    metric: str
    value: float | None
    throughput: float | None
    peak_memory: int | None
    knobs: dict[str, Any]

    def for_people(self) -> dict[str, str]:
        """Returns the cells of the row in a table."""
        return {
            "trial": f"{self.trial:04d}",
            "candidate": self.label,
            "measured": self.measured if self.value is not None else "",
            "outcome": self.outcome.value,
            self.metric: SEARCH_METRICS[self.metric].shown(self.value),
            "samples/s": "" if self.throughput is None else f"{self.throughput:,.1f}",
            "peak memory": "" if self.peak_memory is None else bytes_shown(self.peak_memory),
            "knobs": flat_knobs(self.knobs),
            "reason": self.reason,
        }


def flat_knobs(knobs: Mapping[str, Any]) -> str:
    """Returns knobs as `key=value` words, without their sections, and switches as people read them."""
    words = []
    for key, value in knobs.items():
        if key == PROGRAM:
            words += [shown_switch(place, its) for place, its in value.items()]
        else:
            words.append(flat_knobs(value) if isinstance(value, Mapping) else f"{key}={value}")
    return " ".join(words)


def leaderboard(
    results: Mapping[int, TrialResult], candidates: Mapping[int, Candidate], metric: str
) -> list[LeaderboardRow]:
    """Returns the trials that have ended, without the profile. Completed ones come first, the best at the top."""
    naming = CandidateNames()
    names = {number: naming.of(candidates[number]) for number in sorted(candidates)}
    rows = (row_of(result, candidates[number], names[number], metric) for number, result in results.items())
    return ranked(rows, metric)


def ranked(rows: Iterable[LeaderboardRow], metric: str) -> list[LeaderboardRow]:
    """Returns the rows without the profile's. Completed ones come first, the best at the top."""
    sign = 1.0 if SEARCH_METRICS[metric].smaller_is_better else -1.0
    return sorted(
        (row for row in rows if row.purpose is not Purpose.PROFILE),
        key=lambda row: (row.value is None, 0.0 if row.value is None else sign * row.value, row.trial),
    )


def row_of(result: TrialResult, candidate: Candidate, name: str, metric: str) -> LeaderboardRow:
    """Returns the row of a trial that has ended.

    Args:
        result: the trial's.
        candidate: the candidate that ran.
        name: the candidate's in the study, by `CandidateNames`.
        metric: the optimised metric.
    """
    return LeaderboardRow(
        trial=result.number,
        purpose=result.purpose,
        label=result.purpose.label(name),
        micro_batch_size=candidate.micro_batch_size,
        measured="swept" if result.swept else "fresh",
        outcome=result.outcome,
        reason=result.reason,
        metric=metric,
        value=result.metrics.get(metric),
        throughput=result.metrics.get("throughput"),
        peak_memory=max(result.memory.peak, default=None),
        knobs=candidate.knobs,
    )
