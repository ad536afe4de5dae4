"""Which metric a study goes by: the one that it was asked for, unless that is no figure with this model."""

from trial_lib.records.result import ModelProfile, TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS

INSTEAD = (
    "The study goes by throughput: the model's FLOPs could not be counted, and FLOPS_per_gpu would say nothing. With "
    "one model both rank configurations alike."
)


def metric_with(asked: str, profiled: TrialResult | None) -> str:
    """Returns the metric of a study.

    Args:
        asked: what its arguments say.
        profiled: its profile trial, if that has ended.
    """
    profile: ModelProfile | None = None if profiled is None else profiled.profile
    is_without_figure = profile is not None and not profile.flops_per_sample
    return SEARCH_METRICS[asked].instead or asked if is_without_figure else asked
