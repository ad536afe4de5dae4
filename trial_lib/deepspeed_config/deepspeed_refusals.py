"""DeepSpeed's refusals of a configuration as sentences: the key, the fault and the remedy.

A rank imports this module from the user's environment: standard library only.
"""

import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

# "3 validation errors for DeepSpeedZeroConfig", by pydantic 1 and 2.
_VALIDATION = re.compile(r"\d+ validation errors? for (\w+)\n")
# `  Input should be ... [type=int_parsing, input_value='2e8', input_type=str]`, or `  ... (type=value_error.extra)`.
_COMPLAINT = re.compile(r"  (?P<what>\S.*?)(?: \[type=(?P<type>[\w.]+).*\]| \(type=(?P<old_type>[\w.]+).*\))?$")
_UNKNOWN = ("extra_forbidden", "value_error.extra")
_LINK = re.compile(r" ?See https?://\S+|\n.*", re.DOTALL)
_LONGEST = 300  # characters of DeepSpeed's own words
# "Input should be 0, 1, 2, 3 or 3": DeepSpeed's stages have two names for the last one.
_CHOICES = re.compile(r"(?P<before>Input should be )(?P<values>\S+(?:, \S+)* or \S+)$")
# Sections, and the key in them that a single value is meant for.
_SECTIONS = {
    **{"optimizer": "type", "scheduler": "type", "zero_optimization": "stage"},
    **{"offload_optimizer": "device", "offload_param": "device"},
    **dict.fromkeys(("fp16", "bf16", "bfloat16", "amp", "flops_profiler", "torch_autocast"), "enabled"),
}
# Words for a batch that belongs to another number of replicas: ours, and DeepSpeed's (deepspeed/runtime/config.py).
_OF_REPLICAS = ("* the replicas, of which", "Check batch related parameters")


@dataclass(frozen=True)
class Complaint:
    """One key that a section's class refuses.

    Attributes:
        key: its place in the section.
        what: in pydantic's words; empty for a key that the section does not have.
    """

    key: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Refusal:
    """One refusal of DeepSpeed's.

    Attributes:
        keys: the dotted keys that cause it: one, or several that contradict each other.
        value: the value of the key; for several keys their values, by key.
        said: the exception's type and text.
        what: the words of a section's class about this key; None if the exception has nothing else.
    """

    keys: list[str]
    value: Any
    said: str
    what: str | None = None

    @property
    def is_unknown_key(self) -> bool:
        """Whether DeepSpeed has no such key."""
        return self.what == ""


def complaints_in(text: str) -> list[Complaint]:
    """Returns the keys that a section's class refuses; none for any other text.

    Args:
        text: of an exception. A `ValidationError` of pydantic 1 or 2 lists the keys.
    """
    found = _VALIDATION.match(text)
    if found is None:
        return []
    complaints: list[Complaint] = []
    key = ""
    for line in text[found.end() :].splitlines():
        if not line.startswith(" "):
            key = line.strip()
        elif key and not line.startswith("    ") and (said := _COMPLAINT.match(line)):
            is_unknown = (said["type"] or said["old_type"]) in _UNKNOWN
            steps = tuple(re.split(r"\.| -> ", key))
            complaints.append(Complaint(steps, "" if is_unknown else _CHOICES.sub(_each_once, said["what"])))
            key = ""
    return complaints


def sentence_of(refusal: Refusal, deepspeed: str, known: Collection[str], slots: int) -> tuple[str, str]:
    """Returns the fault and the remedy.

    Args:
        refusal: of a configuration.
        deepspeed: the name of the refusing program, such as `DeepSpeed 0.19.8`.
        known: valid keys, to suggest for one that does not exist.
        slots: devices that train together.
    """
    names, value = " and ".join(refusal.keys), refusal.value
    if TRAIN_BATCH in refusal.keys and len(refusal.keys) > 1 and all(type(each) is int for each in value.values()):
        parts = " * ".join(f"{key} ({value[key]})" for key in (MICRO_BATCH, ACCUMULATION) if key in value)
        what = f"{TRAIN_BATCH} ({value[TRAIN_BATCH]}) is not {parts} {_OF_REPLICAS[0]} {slots} slot(s) allow "
        what += f"{slots} at most." if slots > 1 else "one."
        return what, f"Change one of them, or leave {TRAIN_BATCH} out: it follows from the others."
    if refusal.is_unknown_key:
        near = difflib.get_close_matches(names.rpartition(".")[2], known, n=1, cutoff=0.8)
        return f"{names}: {deepspeed} has no such key.", f'Did you mean "{near[0]}"?' if near else "Remove it."
    inner = None if isinstance(value, dict) else _SECTIONS.get(names.rpartition(".")[2])
    if inner is not None:
        return _no_section(names, value, inner, deepspeed)
    if isinstance(value, list):
        return _list(names, value, deepspeed)
    if isinstance(value, str) and _is_more_than_text(value):
        remedy = f"Write it without quotes: {value.strip().lower()}."
        return f'{names}: {deepspeed} takes no text here, and "{value}" is one.', remedy
    own_words = refusal.said.removeprefix("DeepSpeedConfigError: ")
    said = (refusal.what or _LINK.sub("", own_words)).strip().rstrip(".")[:_LONGEST]
    if len(refusal.keys) > 1:
        return f"{names}: {deepspeed} refuses them together: {said}.", "Change one of them."
    if " has been removed" in said:
        return f"{names}: {deepspeed} refuses it: {said}.", "Remove it."
    return f"{names}: {deepspeed} refuses {_short(value)}: {said}.", "Change it."


def _each_once(found: re.Match[str]) -> str:
    *values, last = dict.fromkeys(re.split(", | or ", found["values"]))
    return found["before"] + (f"{', '.join(values)} or {last}" if values else last)


def _no_section(name: str, value: Any, inner: str, deepspeed: str) -> tuple[str, str]:
    """Returns the fault and the remedy for a value in the place of a section, such as `"optimizer": "AdamW"`."""
    what = f"{name}: {deepspeed} takes a section in braces here, and {_short(value)} is none."
    if inner == "enabled":
        is_on = str(value).strip().lower() not in ("false", "0", "none", "[]")
        return what, f'Write {{"enabled": {json.dumps(is_on)}}}.'
    if inner == "device" and not isinstance(value, str):
        return what, 'Write {"device": "cpu"}, or leave it out.'
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        is_number = isinstance(value, str) and _is_number(value)
        return what, f'Write {{"{inner}": {value if is_number else json.dumps(value)}}}.'
    return what, f'Write {{"{inner}": ...}}.'


def _list(name: str, values: list[Any], deepspeed: str) -> tuple[str, str]:
    """Returns the fault and the remedy for a list in the place of one value."""
    shown = _short(values)
    what = (
        f"{name}: the list {shown} is a search space of DeepSpeed's autotuner, and {deepspeed} trains with one value."
    )
    if name == "zero_optimization.stage":
        stages = " ".join(f"-z {value}" for value in values if type(value) is int)
        return what, f"Write one of them, and let ZeroTune try the others: zerotune tune {stages} -- COMMAND."
    if name in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION):
        return what, "Write the one to train with. ZeroTune tries other sizes without a list."
    return (
        what,
        f"Write one of them, and the values to try in an experiment's YAML: search_space: {{{name}: {shown}}}.",
    )


def is_of_replicas(refused: str) -> bool:
    """Returns whether a refusal says that the batch belongs to another number of replicas."""
    return any(words in refused for words in _OF_REPLICAS)


def _short(value: Any) -> str:
    return "what stands there" if isinstance(value, dict) else json.dumps(value, default=str)[:_LONGEST]


def _is_more_than_text(text: str) -> bool:
    return text.strip().lower() in ("true", "false") or _is_number(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
