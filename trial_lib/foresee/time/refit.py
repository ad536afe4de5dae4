"""The constants of the foreseen time, learned from measured steps. Pure.

The logarithm of a step's seconds is nearly linear in the logarithms of the constants. Its slope is the share of the
step that a constant decides. So a few Gauss-Newton steps find the most likely constants, with the defaults and their
spreads as the prior. A constant that no measured step depends on keeps its default.
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

NOISE = 0.06
_ROUNDS, _LONGEST = 12, 0.5
# A step grows with these constants, and shrinks with the others.
_SIGNS = {"launch": 1.0, "collective": 1.0, "module": 1.0, "whole": 1.0}


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was both foreseen and measured.

    Attributes:
        run: the foreseen run.
        cluster: that it was measured on.
        seconds: of an optimizer step, measured.
        noise: the standard deviation of its logarithm from the best of these models, from arm to arm.
    """

    run: ForeseenRun
    cluster: Cluster
    seconds: float
    noise: float = NOISE


def refit(measured: Sequence[MeasuredStep], prior: Efficiencies | None = None) -> Efficiencies:
    """Returns the constants given measured steps, with what remains unknown about each.

    Args:
        measured: of one kind of device, for constants of that device.
        prior: what was known before; the defaults if None. Fit all steps at once, not some on top of others.
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
        constants = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
        steps = [foresee_step(each.run, each.cluster, constants) for each in measured]
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
    moved = start.changed(dict(zip(CONSTANTS, shifts.tolist(), strict=True)))
    values: dict[str, Any] = {
        name: Constant(getattr(moved, name).value, math.sqrt(float(covariance[index, index])))
        for index, name in enumerate(CONSTANTS)
    }
    # Another arm is off by as much as these are from the model.
    values["whole"] = Constant(values["whole"].value, math.hypot(values["whole"].spread, float(np.median(noise))))
    names = {each.cluster.device.name for each in measured}
    return replace(start, **values, measured=len(measured), device=names.pop() if len(names) == 1 else "")
