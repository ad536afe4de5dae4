"""The seconds to load a batch, which are the same for all arms. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from trial_lib.wire.foreseen_run import ForeseenRun


def with_common_loading(runs: Mapping[str, ForeseenRun]) -> dict[str, ForeseenRun]:
    """Returns the runs with the loading times of all runs that have their micro-batch size.

    Loading is measured, and a run has only a few batches. An arm would otherwise look slow because another process
    disturbed its run, or because its own batches came first.

    Args:
        runs: of one program, by name.
    """
    by_size: dict[int, list[float]] = {}
    for run in runs.values():
        by_size.setdefault(run.micro_batch, []).extend(run.loading_s)
    common = {size: (median(seconds),) for size, seconds in by_size.items() if seconds}
    return {name: replace(run, loading_s=common.get(run.micro_batch, ())) for name, run in runs.items()}
