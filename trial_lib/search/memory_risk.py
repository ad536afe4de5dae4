"""How likely the next trial may be to run out of memory, so that few do. Pure."""

# Share of the trials that may run out of memory, besides the larger sizes of sweeps, which see for themselves; what a
# single one may risk once more have, usually, and at the most.
_SHARE, _LEAST, USUAL_RISK, _MOST = 0.03, 0.01, 0.05, 0.1
# What is taken where nothing less risky is left.
EVEN_ODDS = 0.5


def memory_risk(asked: int, ran_out: int, in_flight: int) -> float:
    """Returns what the trials so far have left of their share for the next one, as a probability.

    Args:
        asked: trials that were asked for.
        ran_out: trials that ran out of memory, what earlier studies and the user's configuration did among them.
        in_flight: those that still run: each may.
    """
    left = _SHARE * (asked + 1) - ran_out - USUAL_RISK * in_flight
    return _LEAST if ran_out and left <= 0 else min(_MOST, max(USUAL_RISK, left))
