"""The metric that a study goes by: the one the user asked for, unless it has no value for this model."""

from trial_lib.records.result import ModelProfile, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS

INSTEAD = (
    "The study goes by throughput, because the model's FLOPs could not be counted for FLOPS_per_gpu. With one model "
    "both metrics rank configurations alike."
)


def metric_with(asked: str, profiled: TrialResult | None) -> str:
    """Returns the metric of a study.

    Args:
        asked: the metric in its arguments.
        profiled: its profile trial; None if that has not ended.
    """
    profile: ModelProfile | None = None if profiled is None else profiled.profile
    is_without_figure = profile is not None and not profile.flops_per_sample
    return SEARCH_METRICS[asked].instead or asked if is_without_figure else asked
