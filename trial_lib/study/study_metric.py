"""Which metric a study goes by: the one that it was asked for, unless that is no figure with this model."""

from trial_lib.experiment.result import ModelProfile, TrialResult
from trial_lib.study.arguments import Metric

_FLOPS: Metric = "FLOPS_per_gpu"
INSTEAD = (
    "The study goes by throughput: the model's FLOPs could not be counted, and FLOPS_per_gpu would say nothing. With "
    "one model both rank configurations alike."
)


def metric_with(asked: Metric, profiled: TrialResult | None) -> Metric:
    """Returns the metric of a study.

    Args:
        asked: what its arguments say.
        profiled: its profile trial, if that has ended.
    """
    profile: ModelProfile | None = None if profiled is None else profiled.profile
    return "throughput" if asked == _FLOPS and profile is not None and not profile.flops_per_sample else asked
