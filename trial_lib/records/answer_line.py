"""The wording of a study's answer, for every place that gives it: terminal, report, Prefect, MLflow, records."""

from trial_lib.command.switches import shown_switch
from trial_lib.deepspeed_config.layout import group_words
from trial_lib.records.candidate import Candidate
from trial_lib.records.units import percent

NO_GAIN = "There is no measurement of your configuration, so there is no gain to state."
NONE_FASTER = "No configuration was faster than yours."
_ONCE = "one measurement, not confirmed"
NONE_FASTER_ONCE = f"No configuration was faster than yours ({_ONCE})."
NONE_FASTER_BEYOND_NOISE = "No configuration was faster than yours beyond the noise."
NONE_FASTER_ALIKE = "No configuration that trains as yours does was faster than yours."
PROCESSOR_TIME = " in processor time"
NONE_FOUND = "No configuration was found."
NOTHING_CONFIRMED = "Nothing could be measured a second time."
NONE_CONFIRMED = "Of the configurations that may be faster than yours ({}) none could be measured a second time."


def gain_line(
    gain: float, name: str = "", interval: tuple[float, float] | None = None, error: float = 0.05, by: str = ""
) -> str:
    """Returns the answer of a study with a faster configuration.

    Args:
        gain: how many times faster the configuration is than the user's.
        name: the configuration, by `name_of`. Empty if it is unknown.
        interval: the ends of the gain's confidence interval. None for a gain from one measurement each.
        error: the probability that the interval misses the true gain.
        by: `PROCESSOR_TIME` if that was compared, and not the clock.

    Example:
        >>> gain_line(2.534, "ZeRO 0, micro-batch 64, accumulation 2", (2.185, 2.919))
        '2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2'
    """
    sure = _ONCE
    if interval is not None:
        low, high = interval
        sure = f"{confidence_level(error)} {low:.2f} to {high:.2f}"
    return f"{gain:.2f}x faster than your configuration{by} ({sure}){name and f': {name}'}"


def confidence_level(error: float) -> str:
    """Returns the words ahead of an interval, such as `95 % CI`."""
    return f"{percent(1 - error)} CI"


def name_of(candidate: Candidate) -> str:
    """Returns a candidate's name in a sentence, such as `ZeRO 2, optimizer offload, micro-batch 24`.

    Tables use the short names of `CandidateNames`.
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
