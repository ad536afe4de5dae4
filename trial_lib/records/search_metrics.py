"""The metrics that a search can optimise, one record each."""

from dataclasses import dataclass
from typing import Annotated

from trial_lib.records.named import NameOf
from trial_lib.records.units import quantity


@dataclass(frozen=True)
class Metric:
    """A metric of a trial.

    Attributes:
        name: as in `--metric`, the trial's record and MLflow.
        unit: for people.
        smaller_is_better: the direction of the search.
        is_throughput: whether the metric is the samples per second times a constant of the model. The intervals of two
            such metrics have the same proportions.
        instead: the metric that a study goes by if the model shows no figure for this one. Empty if it always does.
    """

    name: str
    unit: str
    smaller_is_better: bool = False
    is_throughput: bool = False
    instead: str = ""

    def better(self, value: float, than: float) -> bool:
        """Returns whether `value` is strictly better than `than`."""
        return value < than if self.smaller_is_better else value > than

    def shown(self, value: float | None) -> str:
        """Returns a value for people; nothing for None."""
        return "" if value is None else quantity(value, self.unit)


SEARCH_METRICS = {
    metric.name: metric
    for metric in (
        Metric("FLOPS_per_gpu", "FLOP/s", is_throughput=True, instead="throughput"),
        Metric("throughput", "samples/s", is_throughput=True),
        Metric("forward", "s", smaller_is_better=True),
        Metric("backward", "s", smaller_is_better=True),
        Metric("latency", "s", smaller_is_better=True),
    )
}

MetricName = Annotated[str, NameOf("metric", SEARCH_METRICS)]
