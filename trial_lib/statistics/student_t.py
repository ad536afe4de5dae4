"""Student's t distribution for whole degrees of freedom. A rank imports this module: standard library only. Pure."""

import math


def t_quantile(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t distribution.

    The distribution function is the finite sum of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    (odd degrees of freedom) and 26.7.4 (even ones), inverted by bisection.

    Args:
        probability: of a smaller value, between 0.5 and 1, both excluded.
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    # The bisection reaches the angle's last bit earlier.
    for _ in range(80):
        middle = (low + high) / 2
        if (1 + _central_probability(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """Returns the probability that |t| is below sqrt(degrees) * tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
