"""The configurations of a confirmation, and which of the search's come first. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS

_NO_FAILURE = (Outcome.COMPLETED, Outcome.TOO_SLOW, Outcome.CANCELLED)


@dataclass(frozen=True)
class Contender:
    """A configuration to measure again.

    Attributes:
        candidate: the configuration, with its slots.
        config: the complete DeepSpeed configuration, with the program's switches.
        reading: its trial in the search, or the trial of the user's configuration.
        expected: the metric that the search expects, in its unit; None if it expects the reading.
    """

    candidate: Candidate
    config: Mapping[str, Any]
    reading: TrialResult
    expected: float | None = None

    @property
    def key(self) -> str:
        """The name of the configuration in its trials."""
        return self.reading.config_hash

    def worth(self, metric: str) -> float:
        """Returns its expected metric, in the metric's unit."""
        return self.reading.metrics[metric] if self.expected is None else self.expected


def ranking(readings: Sequence[Contender], own: Contender | None, metric: str) -> list[Contender]:
    """Returns the configurations that completed in the search, each once, best first, without the user's.

    Configurations that failed in another trial come last.
    """
    sign = 1.0 if SEARCH_METRICS[metric].smaller_is_better else -1.0
    doubtful = {one.key for one in readings if not one.reading.from_outside and one.reading.outcome not in _NO_FAILURE}

    def order(one: Contender) -> tuple[bool, float, int]:
        return one.key in doubtful, sign * one.worth(metric), one.reading.number

    by_key: dict[str, Contender] = {}
    for contender in sorted((one for one in readings if is_good(one.reading, metric)), key=order):
        by_key.setdefault(contender.key, contender)
    if own is not None:
        by_key.pop(own.key, None)
    return list(by_key.values())


def is_good(result: TrialResult, metric: str) -> bool:
    """Returns whether a trial has measured the metric."""
    return result.outcome is Outcome.COMPLETED and result.metrics.get(metric, 0.0) > 0.0
