"""The constants of the foreseen time, learned from measured steps. Pure.

The logarithm of a step's seconds is nearly linear in the logarithms of the constants. So a few Gauss-Newton steps find
the most likely constants, with the defaults and their spreads as the prior. A constant that no measured step depends on
keeps its default.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trial_lib.foresee.time.devices import Cluster
from trial_lib.foresee.time.efficiencies import CONSTANTS, Constant, Efficiencies
from trial_lib.foresee.time.step_time import foresee_step
from trial_lib.wire.foreseen_run import ForeseenRun

# The standard deviation of a measured step's logarithm from the best of these models, from arm to arm.
NOISE = 0.06
_ROUNDS, _NUDGE, _LONGEST = 6, 0.05, 0.7


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was both foreseen and measured.

    Attributes:
        run: the foreseen run.
        cluster: that it was measured on.
        seconds: of an optimizer step, measured.
    """

    run: ForeseenRun
    cluster: Cluster
    seconds: float


def refit(measured: Sequence[MeasuredStep], prior: Efficiencies | None = None, noise: float = NOISE) -> Efficiencies:
    """Returns the constants given measured steps, with what remains unknown about each.

    Args:
        measured: of one kind of device, for constants of that device.
        prior: what was known before; the defaults if None. Fit all steps at once, not some on top of others.
        noise: the standard deviation of a step's logarithm.
    """
    start = prior or Efficiencies()
    if not measured:
        return start
    logs = np.log([each.seconds for each in measured])
    spreads = np.array([getattr(start, name).spread for name in CONSTANTS])
    shifts = np.zeros(len(CONSTANTS))
    slopes = np.zeros((len(measured), len(CONSTANTS)))
    for _ in range(_ROUNDS):
        here = _logs(measured, start, shifts)
        for index in range(len(CONSTANTS)):
            nudged = shifts.copy()
            nudged[index] += _NUDGE
            slopes[:, index] = (_logs(measured, start, nudged) - here) / _NUDGE
        # Least squares of the measurements, weighted by the noise, and of the shifts, weighted by their spreads.
        rows = np.vstack([slopes / noise, np.diag(1.0 / spreads)])
        wanted = np.concatenate([(logs - here) / noise, -shifts / spreads])
        change = np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -_LONGEST, _LONGEST)
        shifts = shifts + change
        if float(np.abs(change).max()) < 1e-3:
            break
    covariance = np.linalg.inv(slopes.T @ slopes / noise**2 + np.diag(1.0 / spreads**2))
    moved = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
    values: dict[str, Any] = {
        name: Constant(getattr(moved, name).value, math.sqrt(float(covariance[index, index])))
        for index, name in enumerate(CONSTANTS)
    }
    # Another arm is off by as much as these are from the model.
    values["whole"] = Constant(values["whole"].value, math.hypot(values["whole"].spread, noise))
    names = {each.cluster.device.name for each in measured}
    return replace(start, **values, measured=len(measured), device=names.pop() if len(names) == 1 else "")


def _logs(measured: Sequence[MeasuredStep], start: Efficiencies, shifts: Any) -> Any:
    constants = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
    return np.log([foresee_step(each.run, each.cluster, constants).seconds for each in measured])
