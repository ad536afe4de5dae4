"""The allowed probability that the next trial runs out of memory, and what a trial is worth with it. Pure."""

from collections.abc import Sequence

# The share of trials that may run out of memory. Larger sizes of sweeps do not count, because the group checks them
# itself. Then the risk of a single trial: once more have failed, usually, and at most.
_SHARE, _LEAST, USUAL_RISK, _MOST = 0.03, 0.01, 0.05, 0.1
# The risk that is accepted if nothing safer is left.
EVEN_ODDS = 0.5
# If memory was foreseen, so many trials may have the most risk. Later ones have to earn it back.
_EARLY = 4


def memory_risk(asked: int, ran_out: int, in_flight: int, is_foreseen: bool = False) -> float:
    """Returns the probability of running out of memory that the next trial may have.

    If memory was foreseen, the first trials have the most, because a larger size gains most there. Later ones gain
    little by it.

    Args:
        asked: trials that were asked for.
        ran_out: trials that ran out of memory, including those of earlier studies and of the user's configuration.
        in_flight: trials that still run. Each may run out of memory.
        is_foreseen: whether foreseen runs are the memory model's prior.
    """
    left = _SHARE * (asked + 1) - ran_out - USUAL_RISK * in_flight
    if ran_out and left <= 0:
        return _LEAST
    if is_foreseen and asked < _EARLY:
        return _MOST
    spent = _EARLY * _MOST if is_foreseen else 0.0
    return min(_MOST, max(USUAL_RISK, left - spent))


def worth_of_sweep(gain: float, fits: float, larger: Sequence[tuple[float, float]]) -> float:
    """Returns the expected gain of a sweep, whose group goes on while the next size fits.

    Args:
        gain: of its first size.
        fits: the probability that the first size fits.
        larger: gain and probability to fit of each later size, ascending in size.
    """
    worth, reached = gain, 1.0
    for next_gain, next_fits in larger:
        reached = min(reached, next_fits)
        worth += reached * max(0.0, next_gain - gain)
        gain = max(gain, next_gain)
    return fits * worth
