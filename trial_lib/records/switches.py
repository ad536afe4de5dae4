"""Switches of the user's program: settings that a search varies beside those of DeepSpeed.

A switch has the name of its place in the command, as `--map` names it: an option, an environment variable, an override,
a value in a file, a word by its number. `mapping_targets` reads and sets the places. Those of `turned` have no place in
a command: a rank turns them.

A rank imports this module from the user's environment: standard library only.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS
from zerotune.trial_lib.deepspeed_config.layout import PROGRAM as PROGRAM
from zerotune.trial_lib.messages.turned import FORESEEN, is_by_rank

SwitchValue = bool | int | float | str | None
"""The value of a switch. None leaves its place as typed. A boolean option is there or not, if it takes no value."""

AS_TYPED = "as typed"
"""The value of a switch for people, if the command does not set it."""

# Variables that libraries read, and not the program: threads, the network, allocators, compilers. A foreseen run is one
# process without a device, so none of them changes it.
_OF_LIBRARIES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|VECLIB|NUMEXPR|NCCL|GLOO|RCCL|UCX|UCC|FI|CUDA|CUBLAS|CUDNN|HIP|PYTORCH|TORCH|TORCHINDUCTOR|"
    r"TRITON|DS|DEEPSPEED|MALLOC|TOKENIZERS|HF|TRANSFORMERS|LD)_.*"
)
_WORDS = (("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0"))


def is_switch(path: str) -> bool:
    return path.startswith(f"{PROGRAM}.")


def path_of(place: str) -> str:
    """Returns the path of a switch among a candidate's knobs."""
    return f"{PROGRAM}.{place}"


def place_of(path: str) -> str:
    """Returns the place of a switch by its path among a candidate's knobs. Another path stays as it is."""
    return path.removeprefix(f"{PROGRAM}.")


def switches_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the switches among some settings, by their places."""
    return dict(settings.get(PROGRAM) or {})


def own_switches(
    typed: Mapping[str, Any], defaults: Mapping[str, Any], turnable: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Returns the values of the varied switches in the user's configuration, by their places. They are typed, or (None)
    left to the defaults that the program's own parser has read, and to the first value of what ZeroTune turns. A
    boolean option that was not typed is off.
    """
    # If the search tries words for a boolean, its own word for the default is not known.
    known = {place: value for place, value in defaults.items() if not isinstance(value, bool)}
    own = {**known, **{place: values[0] for place, values in turnable.items()}}
    return {place: own.get(place) if value is None else value for place, value in typed.items()}


def other_switches(settings: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns the switches among some settings whose values the user's settings have not: place and value, as text."""
    typed = switches_of(own)
    return tuple((place, repr(value)) for place, value in switches_of(settings).items() if typed.get(place) != value)


def is_foreseeable(place: str) -> bool:
    """Returns whether a foreseen run may show what another value of a switch changes."""
    return place in FORESEEN if is_by_rank(place) else _OF_LIBRARIES.fullmatch(place) is None


def switch_key(settings: Mapping[str, Any], places: Collection[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Returns the switches among some settings in the order of their places: place and value, as text. A switch as
    typed is left out, and one whose place is not among the places, if there are any.
    """
    return tuple(
        (place, repr(value))
        for place, value in sorted(switches_of(settings).items())
        if value is not None and (places is None or place in places)
    )


def unforeseen_switches(
    settings: Mapping[str, Any], own: Mapping[str, Any], foreseen: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Returns those of `other_switches` whose places no foreseen run has set."""
    return tuple(each for each in other_switches(settings, own) if each[0] not in foreseen)


def deepspeed_part(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns some settings without the switches: the part that DeepSpeed reads."""
    return {key: value for key, value in settings.items() if key not in (PROGRAM, LAYOUTS)}


def is_option(place: str) -> bool:
    return place.startswith("-")


def shown_switch(place: str, value: SwitchValue) -> str:
    """Returns a switch as people read it, such as `--compile`, `no --compile` or `OMP_NUM_THREADS=2`."""
    if value is None:
        return f"{place} {AS_TYPED}"
    if isinstance(value, bool) and (is_option(place) or is_by_rank(place)):
        return place if value else f"no {place}"
    return f"{place}={text_of(value)}"


def text_of(value: SwitchValue, typed: str = "") -> str:
    """Returns a value's text in a command. A boolean follows the typed text: `True` becomes `False`, 1 becomes 0."""
    if not isinstance(value, bool):
        return str(value)
    pair = next((pair for pair in _WORDS if typed.lower() in pair), _WORDS[0])
    word = pair[0] if value else pair[1]
    return word.upper() if typed.isupper() and len(typed) > 1 else word.capitalize() if typed[:1].isupper() else word


def boolean_of(text: str) -> bool | None:
    """Returns the boolean that a text in a command means; None if it means none."""
    return next((text.lower() == pair[0] for pair in _WORDS if text.lower() in pair), None)
