"""The metrics a search can optimise: one place for their names, units and direction."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric of a trial.

    Attributes:
        name: as in `--metric`, the trial's record and MLflow.
        unit: for people.
        smaller_is_better: the direction a search goes.
    """

    name: str
    unit: str
    smaller_is_better: bool

    def better(self, value: float, than: float) -> bool:
        """Returns whether `value` is strictly better than `than`."""
        return value < than if self.smaller_is_better else value > than


SEARCH_METRICS = {
    metric.name: metric
    for metric in (
        Metric("FLOPS_per_gpu", "FLOP/s", smaller_is_better=False),
        Metric("throughput", "samples/s", smaller_is_better=False),
        Metric("forward", "s", smaller_is_better=True),
        Metric("backward", "s", smaller_is_better=True),
        Metric("latency", "s", smaller_is_better=True),
    )
}
