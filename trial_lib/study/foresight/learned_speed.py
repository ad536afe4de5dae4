"""What the trials of a study show of its devices' speed, for later plans and studies."""

import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any

from trial_lib.foresee.time.devices import Cluster
from trial_lib.foresee.time.efficiencies import DeviceSpeed
from trial_lib.foresee.time.refit import MeasuredStep, refit
from trial_lib.records.candidate import Purpose
from trial_lib.records.result import Outcome
from trial_lib.study.foresight.foreseen_steps import ForeseenSteps
from trial_lib.study.state import StudyState
from trial_lib.wire.foreseen_run import ForeseenRun

_MEASURED = (Purpose.SUBMITTED, Purpose.SEARCH, Purpose.CONFIRM)
# A fit foresees each of them a dozen times.
_MOST = 12


def learned_speed(
    foreseen: ForeseenSteps, study_id: str, state: StudyState, base_config: Mapping[str, Any]
) -> DeviceSpeed | None:
    """Returns what a study has learned of its devices.

    All of its own steps are fitted at once, from the defaults. What an earlier study has learned is no prior, because
    its steps may be the same ones.

    Args:
        foreseen: the steps of the study's arms, by its plan or by its own foreseen runs.
        study_id: of the study.
        state: of the study, which has ended.
        base_config: the user's DeepSpeed configuration, as far as it is known.

    Returns:
        None if the devices are no known ones, or no trial that completed was foreseen.
    """
    cluster = foreseen.cluster
    if cluster is None:
        return None
    steps = measured_steps(foreseen, cluster, state, base_config)
    if not steps:
        return None
    return DeviceSpeed(
        study_id=study_id,
        device=cluster.device.name,
        ended_at=time.time(),
        steps=len(steps),
        efficiencies=refit(steps).to_json(),
    )


def measured_steps(
    foreseen: ForeseenSteps, cluster: Cluster, state: StudyState, base_config: Mapping[str, Any]
) -> list[MeasuredStep]:
    """Returns the optimizer steps of a study that were foreseen, one for each configuration.

    Args:
        foreseen: the steps of the study's arms.
        cluster: that it ran on.
        state: of the study.
        base_config: the user's DeepSpeed configuration, as far as it is known.
    """
    runs: dict[str, tuple[str, ForeseenRun]] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    for number, result in state.results.items():
        speed = result.metrics.get("throughput", 0.0)
        if result.purpose not in _MEASURED or result.outcome is not Outcome.COMPLETED or speed <= 0:
            continue
        candidate = state.candidates[number]
        found = foreseen.of(candidate, base_config)
        if found is not None:
            key = candidate.config_hash(base_config)
            runs[key] = found
            seconds[key].append(found[1].micro_batch * found[1].accumulation * found[1].replicas / speed)
    arms: dict[str, int] = defaultdict(int)
    places = {}
    for key, (label, _) in runs.items():
        places[key] = arms[label]
        arms[label] += 1
    # Each arm shows other constants, so each comes before the second one of any.
    chosen = sorted(runs, key=lambda key: places[key])[:_MOST]
    return [MeasuredStep(runs[key][1], cluster, median(seconds[key])) for key in chosen]
