"""The constants of the foreseen time, fitted to measured steps of one kind of device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.foresee.public_gpus.speed import CONSTANTS, changed
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.devices import Cluster, Constant, Efficiencies
from zerotune.trial_lib.plan.step_time import planned_step

NOISE = 0.06
_ROUNDS, _LONGEST = 12, 0.5
# A step grows with these constants, and shrinks with the others.
_SIGNS = {"launch": 1.0, "collective": 1.0, "module": 1.0, "whole": 1.0}


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was both foreseen and measured."""

    run: ForeseenRun  # the foreseen run
    cluster: Cluster  # that it was measured on
    seconds: float  # of an optimizer step, measured
    noise: float = NOISE  # the standard deviation of its logarithm from the best of these models, from arm to arm


def refit(measured: Sequence[MeasuredStep], prior: Efficiencies | None = None) -> Efficiencies:
    """The constants given measured steps of one kind of device, with what remains unknown about each.

    `prior` is what was known before. Fit all steps at once, not some on top of others.
    """
    start = prior or Efficiencies()
    if not measured:
        return start
    noise = np.array([each.noise for each in measured])
    logs = np.log([each.seconds for each in measured])
    spreads = np.array([getattr(start, name).spread for name in CONSTANTS])
    shifts = np.zeros(len(CONSTANTS))
    slopes = np.zeros((len(measured), len(CONSTANTS)))
    for _ in range(_ROUNDS):
        constants = changed(start, dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
        steps = [planned_step(each.run, each.cluster, constants) for each in measured]
        here = np.log([each.seconds for each in steps])
        slopes = np.array([[_SIGNS.get(name, -1.0) * step.shares[name] for name in CONSTANTS] for step in steps])
        # Least squares of the measurements, weighted by the noise, and of the shifts, weighted by their spreads.
        rows = np.vstack([slopes / noise[:, None], np.diag(1.0 / spreads)])
        wanted = np.concatenate([(logs - here) / noise, -shifts / spreads])
        change = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -_LONGEST, _LONGEST)
        shifts = shifts + change
        if float(np.abs(change).max()) < 1e-3:
            break
    weighted = slopes / noise[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted + np.diag(1.0 / spreads**2))
    moved = changed(start, dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
    values: dict[str, Any] = {
        name: Constant(getattr(moved, name).value, math.sqrt(float(covariance[index, index])))
        for index, name in enumerate(CONSTANTS)
    }
    # Another arm is off by as much as these are from the model.
    values["whole"] = Constant(values["whole"].value, math.hypot(values["whole"].spread, float(np.median(noise))))
    return replace(start, **values)
