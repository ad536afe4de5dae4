"""The allowed probability that the next trial runs out of memory. It keeps such trials few. Pure."""

# The share of trials that may run out of memory. Larger sizes of sweeps do not count, because the group checks them
# itself. Then the risk of a single trial: once more have failed, usually, and at most.
_SHARE, _LEAST, USUAL_RISK, _MOST = 0.03, 0.01, 0.05, 0.1
# The risk that is accepted if nothing safer is left.
EVEN_ODDS = 0.5


def memory_risk(asked: int, ran_out: int, in_flight: int) -> float:
    """Returns the probability of running out of memory that the next trial may have.

    Args:
        asked: trials that were asked for.
        ran_out: trials that ran out of memory, including those of earlier studies and of the user's configuration.
        in_flight: trials that still run. Each may run out of memory.
    """
    left = _SHARE * (asked + 1) - ran_out - USUAL_RISK * in_flight
    return _LEAST if ran_out and left <= 0 else min(_MOST, max(USUAL_RISK, left))
