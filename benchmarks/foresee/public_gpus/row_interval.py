"""The 90 % interval of a row's figure of memory.

Reserved memory is less certain than allocated memory, for reasons that no foreseen run shows. Another program leaves
other pieces between its blocks. The allocator keeps what it once had, and a long run has other samples, evaluations and
checkpoints, so its cache grows for as long as the device has room. A full device gives cached segments back, so a
reading there is between the needed bytes and the whole device. A source that does not say whether it recomputes
activations may do either.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from trial_lib.foresee.memory.fits import INTERVAL, PeakForecast
from trial_lib.memory.budget import Uncertain

ROW_PIECES_ERROR = 0.5
"""Standard deviation of the memory that the allocator cannot use, as a share of it, for a program of a row's facts.

Read off the decided rows of reserved or shown memory, or of an unknown kind, as the root of the mean square of their
errors is. A foreseen run of the program itself has `PIECES_ERROR`.
"""

GROWS = 0.2
"""Share of runs whose reserved memory grows on after the foreseen steps, to anything up to the whole device.

Read off the decided rows of reserved or shown memory, or of an unknown kind: 3 of 18 have a fifth more than is
foreseen, or over. Two of the three are of an unknown kind.
"""

FULL = 0.5
"""Share of runs that are read as full, if their device gets full. The others have given segments back. Set by hand."""

_TRIES = 60


@dataclass(frozen=True)
class ForeseenWay:
    """What was foreseen of a row in one way.

    Attributes:
        weight: the probability of the way.
        figure: bytes of the row's figure, on a device that never gets full.
        needed: the least bytes of a device on which it runs.
    """

    weight: float
    figure: Uncertain
    needed: Uncertain


def figure_of(forecast: PeakForecast, figure: str) -> Uncertain:
    """Returns a figure of a forecast with the uncertainty of a row's pieces.

    Args:
        forecast: of a row's program.
        figure: `allocated`, `reserved` or `shown`.
    """
    known: Uncertain = getattr(forecast, figure)
    if figure == "allocated":
        return known
    pieces = ROW_PIECES_ERROR * (forecast.reserved.mean - forecast.allocated.mean)
    outside = known.mean - forecast.reserved.mean
    shared = forecast.allocated.deviation, pieces, _outside_error(forecast) if outside else 0.0
    return Uncertain(known.mean, sum(each**2 for each in shared) ** 0.5)


def _outside_error(forecast: PeakForecast) -> float:
    return max(0.0, forecast.shown.deviation**2 - forecast.reserved.deviation**2) ** 0.5


def ends_of(ways: Sequence[ForeseenWay], most: float, is_kept: bool) -> tuple[float, float]:
    """Returns the ends of the 90 % interval of a row's figure.

    Args:
        ways: of the row, whose weights add up to 1.
        most: bytes that the figure cannot exceed; infinity if nothing is known.
        is_kept: whether the figure has what the allocator keeps.
    """

    def below(size: float) -> float:
        """Returns the probability that the figure is at most a size."""
        if size >= most:
            return 1.0
        return sum(way.weight * (_kept(way, most) if is_kept else _normal(way.figure))(size) for way in ways)

    top = max(way.figure.mean + 10 * way.figure.deviation for way in ways)
    highest = top if most == float("inf") else most
    return _quantile(below, (1 - INTERVAL) / 2, highest), _quantile(below, (1 + INTERVAL) / 2, highest)


def _normal(figure: Uncertain) -> Callable[[float], float]:
    return NormalDist(figure.mean, max(1.0, figure.deviation)).cdf


def _kept(way: ForeseenWay, most: float) -> Callable[[float], float]:
    if way.figure.mean >= most:
        given_back = _normal(way.needed)
        return lambda size: (1 - FULL) * given_back(size)
    as_foreseen = _normal(way.figure)
    if most == float("inf"):
        return as_foreseen
    room = most - way.figure.mean

    def below(size: float) -> float:
        grown = min(1.0, max(0.0, (size - way.figure.mean) / room))
        return (1 - GROWS) * as_foreseen(size) + GROWS * grown

    return below


def _quantile(below: Callable[[float], float], share: float, highest: float) -> float:
    low, high = 0.0, highest
    for _ in range(_TRIES):
        middle = (low + high) / 2
        if below(middle) < share:
            low = middle
        else:
            high = middle
    return high
