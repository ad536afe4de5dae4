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
            complaints.append(Complaint(steps, "" if is_unknown else said["what"]))
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
    if isinstance(value, str) and _is_more_than_text(value):
        remedy = f"Write it without quotes: {value.strip().lower()}."
        return f'{names}: {deepspeed} takes no text here, and "{value}" is one.', remedy
    own_words = refusal.said.removeprefix("DeepSpeedConfigError: ")
    said = (refusal.what or _LINK.sub("", own_words)).strip().rstrip(".")[:_LONGEST]
    if len(refusal.keys) > 1:
        return f"{names}: {deepspeed} refuses them together: {said}.", "Change one of them."
    if " has been removed" in said:
        return f"{names}: {deepspeed} refuses it: {said}.", "Remove it."
    remedy = "Write the one value to train with." if isinstance(value, list) else "Change it."
    return f"{names}: {deepspeed} refuses {_short(value)}: {said}.", remedy


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
