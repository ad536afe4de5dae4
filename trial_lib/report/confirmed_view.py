"""The configurations that were measured again, for the report and the terminal."""

from collections.abc import Mapping

from trial_lib.records.candidate import Candidate
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.report.study_view import ConfirmedView, Interval
from trial_lib.study.confirm.finding import Confirmed, Estimate, Finding


def confirmed_views(finding: Finding, candidates: Mapping[int, Candidate]) -> tuple[ConfirmedView, ...]:
    """Returns the configurations that a finding compares, the user's first.

    Args:
        finding: the study's.
        candidates: its candidates, by the numbers of their trials.
    """
    measured = [one for one in (finding.own, *finding.candidates) if one is not None and one.trials]
    return tuple(
        ConfirmedView(
            name="your configuration" if one.verdict == "own" else one.name,
            verdict=one.verdict,
            trials=one.trials,
            micro_batch_size=candidates[one.trials[0]].micro_batch_size,
            throughput=_throughput(one, finding.metric),
            gain=_interval(one.gain),
            is_winner=one == finding.winner,
            note=one.reason or one.losses,
        )
        for one in measured
        # The history may be missing.
        if one.trials[0] in candidates
    )


def _interval(estimate: Estimate | None) -> Interval | None:
    return None if estimate is None else Interval(estimate.value, estimate.low, estimate.high)


def _throughput(confirmed: Confirmed, metric: str) -> Interval | None:
    value, estimate = confirmed.metrics.get("throughput"), confirmed.value
    if value is None:
        return None
    if estimate is None or not SEARCH_METRICS[metric].is_throughput or not estimate.value:
        return Interval(value, value, value)
    return Interval(value, value * estimate.low / estimate.value, value * estimate.high / estimate.value)
