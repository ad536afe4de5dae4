"""Quantities as people read them."""

from zerotune.trial_lib.deepspeed_config.layout import group_words
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.switches import shown_switch

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_KIB, _MIB, _GIB, _TIB = 2**10, 2**20, 2**30, 2**40


def quantity(value: float, unit: str) -> str:
    """Returns a value with its unit. FLOP/s get a prefix, and seconds below one become milliseconds.

    Example:
        >>> quantity(61_300_000_000.0, "FLOP/s"), quantity(0.0123, "s"), quantity(1234.5, "samples/s")
        ('61.3 GFLOP/s', '12.3 ms', '1,234.5 samples/s')
    """
    scale, name = scaled_unit(value, unit)
    scaled = value / scale
    return f"{scaled:,.1f} {name}" if abs(scaled) >= 10 else f"{scaled:.3g} {name}"


def interval(value: float, low: float, high: float, unit: str, level: str = "") -> str:
    """Returns a value with its interval, in one unit. The level, such as `95 % CI`, stands ahead of the ends.

    Example:
        >>> interval(2.53e9, 2.19e9, 2.92e9, "FLOP/s")
        '2.53 GFLOP/s (2.19 to 2.92)'
    """
    scale, name = scaled_unit(value, unit)
    return f"{value / scale:.4g} {name} ({f'{level} '.lstrip()}{low / scale:.4g} to {high / scale:.4g})"


def percent(share: float) -> str:
    """Returns a share as text: `95 %` for 0.95."""
    return f"{100 * share:.3g} %"


def scaled_unit(largest: float, unit: str) -> tuple[float, str]:
    """Returns what to divide values by, as of an axis, and their unit then.

    Example:
        >>> scaled_unit(6.13e10, "FLOP/s"), scaled_unit(0.5, "s"), scaled_unit(439.0, "samples/s")
        ((1000000000.0, 'GFLOP/s'), (0.001, 'ms'), (1.0, 'samples/s'))
    """
    if unit == "FLOP/s":
        return next(((size, f"{letter}{unit}") for size, letter in _PREFIXES if abs(largest) >= size), (1.0, unit))
    return (1e-3, "ms") if unit == "s" and abs(largest) < 1 else (1.0, unit)


def bytes_shown(count: float) -> str:
    """Returns a number of bytes.

    Example:
        >>> bytes_shown(434_110_464), bytes_shown(80 * 2**30), bytes_shown(700)
        ('414 MiB', '80.0 GiB', '700 bytes')
    """
    for least, name in ((_TIB, "TiB"), (_GIB, "GiB")):
        if abs(count) >= least:
            return f"{count / least:,.1f} {name}"
    if abs(count) >= 10 * _MIB:
        return f"{count / _MIB:,.0f} MiB"
    if abs(count) >= _MIB:
        return f"{count / _MIB:.1f} MiB"
    return f"{count / _KIB:.0f} KiB" if abs(count) >= _KIB else f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Returns a duration for people, such as `1 h 05 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


# The wording of a study's answer, for every place that gives it: terminal, report, Prefect, MLflow, records.

NO_GAIN = "There is no measurement of your configuration, so there is no gain to state."
NONE_FASTER = "No configuration was faster than yours."
_ONCE = "one measurement, not confirmed"
NONE_FASTER_ONCE = f"No configuration was faster than yours ({_ONCE})."
NONE_FASTER_BEYOND_NOISE = "No configuration was faster than yours beyond the noise."
NONE_FASTER_ALIKE = "No configuration that trains as yours does was faster than yours."
NONE_FOUND = "No configuration was found."
NOTHING_CONFIRMED = "Nothing could be measured a second time."
NONE_CONFIRMED = "Of the configurations that may be faster than yours ({}) none could be measured a second time."


def gain_line(gain: float, name: str = "", interval: tuple[float, float] | None = None, error: float = 0.05) -> str:
    """Returns the answer of a study with a faster configuration. The interval, which misses the true gain with the
    probability `error`, is None for a gain from one measurement each.

    Example:
        >>> gain_line(2.534, "ZeRO 0, micro-batch 64, accumulation 2", (2.185, 2.919))
        '2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2'
    """
    sure = _ONCE
    if interval is not None:
        low, high = interval
        sure = f"{confidence_level(error)} {low:.2f} to {high:.2f}"
    return f"{gain:.2f}x faster than your configuration ({sure}){name and f': {name}'}"


def confidence_level(error: float) -> str:
    """Returns the words ahead of an interval, such as `95 % CI`."""
    return f"{percent(1 - error)} CI"


def gain_shown(gain: float | None, interval: tuple[float, float] | None) -> str:
    """Returns a gain in a table. One of a study that was cut short is no answer, because it was measured once."""
    if gain is None:
        return "-"
    return f"{gain:.2f}x" if interval is not None or gain == 1.0 else f"{gain:.2f}x, not confirmed"


def name_of(candidate: Candidate) -> str:
    """Returns a candidate's name in a sentence, such as `ZeRO 2, optimizer offload, micro-batch 24`. Tables use the
    short names of `CandidateNames`.
    """
    zero = candidate.knobs.get("zero_optimization") or {}
    words = [] if candidate.zero_stage is None else [f"ZeRO {candidate.zero_stage}"]
    for key, word in (("offload_optimizer", "optimizer offload"), ("offload_param", "parameter offload")):
        if (zero.get(key) or {}).get("device", "none") != "none":
            words.append(word)
    words += group_words(candidate.knobs)
    words += [shown_switch(place, value) for place, value in candidate.switches.items() if value is not None]
    words.append(f"micro-batch {candidate.micro_batch_size}")
    if candidate.gradient_accumulation_steps > 1:
        words.append(f"accumulation {candidate.gradient_accumulation_steps}")
    return ", ".join(words)
