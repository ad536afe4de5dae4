"""What a table's candidates would show without noise: the best linear prediction from all of their repeats.

The median of two noisy repeats is no truth: the best of some hundred of them is the luckiest, and a search that reads
one of the two would find it by its luck. So a candidate's truth is what a mixed model predicts (Henderson, Biometrics
31 (1975) 423): a curve over sizes for each arm, what each arm departs from it at a size, what each family departs from
its arm, and what a family does at one size alone, each as far as it stands out of the noise. The noise is known from
the repeats; how much the parts vary is what makes the table likeliest.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

# Prior standard deviation of the coefficients of a curve: they are as good as free.
_FREE = 10.0
# Standard deviations that the search for the likeliest starts at, and its bounds.
_START, _BOUNDS = 0.03, (1e-4, 0.5)


@dataclass(frozen=True)
class Cell:
    """The repeats of one candidate.

    Attributes:
        arm: name of its arm.
        family: name of its family.
        size: micro-batch size (samples).
        logs: logarithm of what each repeat measured.
    """

    arm: Hashable
    family: Hashable
    size: int
    logs: tuple[float, ...]


def expected_logs(cells: Sequence[Cell], noise: float) -> list[float]:
    """Returns the expected logarithm of each cell.

    Args:
        cells: one for each candidate of which every repeat completed.
        noise: standard deviation of a repeat's logarithm.
    """
    if len(cells) < 2 or noise == 0:
        return [float(np.mean(cell.logs)) for cell in cells]
    means = np.array([np.mean(cell.logs) for cell in cells])
    centre = means.mean()
    parts = _parts(cells)
    own = np.diag([noise**2 / len(cell.logs) for cell in cells])

    def negative_log_likelihood(logs: np.ndarray) -> float:
        factor = cho_factor(_covariance(parts, logs) + own, lower=True)
        fit = (means - centre) @ cho_solve(factor, means - centre)
        return float(0.5 * fit + np.log(np.diag(factor[0])).sum())

    bounds = [(log(_BOUNDS[0]), log(_BOUNDS[1]))] * (len(parts) - 1)
    likeliest = minimize(negative_log_likelihood, [log(_START)] * len(bounds), bounds=bounds, method="L-BFGS-B").x
    covariance = _covariance(parts, likeliest)
    expected: np.ndarray = centre + covariance @ np.linalg.solve(covariance + own, means - centre)
    return expected.tolist()


def _parts(cells: Sequence[Cell]) -> list[np.ndarray]:
    """Returns the covariances of the curves, and of the departures at a standard deviation of 1."""
    sizes = np.array([log(cell.size) for cell in cells])
    powers = np.stack([np.ones_like(sizes), sizes - sizes.mean(), (sizes - sizes.mean()) ** 2])
    same_arm = _same([cell.arm for cell in cells])
    return [
        same_arm * (_FREE**2 * powers.T @ powers),
        _same([(cell.arm, cell.size) for cell in cells]),
        _same([cell.family for cell in cells]),
        np.eye(len(cells)),
    ]


def _covariance(parts: Sequence[np.ndarray], logs: Sequence[float]) -> np.ndarray:
    covariance: np.ndarray = parts[0] + sum(np.exp(2 * each) * part for each, part in zip(logs, parts[1:], strict=True))
    return covariance


def _same(names: Sequence[Hashable]) -> np.ndarray:
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    codes = np.array([number[name] for name in names])
    same: np.ndarray = (codes[:, None] == codes[None, :]).astype(float)
    return same
