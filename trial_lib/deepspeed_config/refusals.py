"""What DeepSpeed refuses: the installed DeepSpeed's check of a configuration, and its refusals as sentences."""

import contextlib
import copy
import difflib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

# DeepSpeed's refusals of a configuration as sentences: the key, the fault and the remedy.

# "3 validation errors for DeepSpeedZeroConfig".
_VALIDATION = re.compile(r"\d+ validation errors? for (\w+)\n")
# `  Input should be ... [type=int_parsing, input_value='2e8', input_type=str]`.
_COMPLAINT = re.compile(r"  (?P<what>\S.*?)(?: \[type=(?P<type>[\w.]+).*\])?$")
_UNKNOWN = "extra_forbidden"
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
    """One key that a section's class refuses."""

    key: tuple[str, ...]  # its place in the section
    what: str  # in pydantic's words; empty for a key that the section does not have


@dataclass(frozen=True)
class Refusal:
    keys: list[str]  # the dotted keys that cause it: one, or several that contradict each other
    value: Any  # the value of the key; for several keys their values, by key
    said: str  # the exception's type and text
    # The words of a section's class about this key: empty if there is no such key, None if the exception has none
    what: str | None = None


def complaints_in(text: str) -> list[Complaint]:
    """Returns the keys that a section's class refuses; none for any other text."""
    found = _VALIDATION.match(text)
    if found is None:
        return []
    complaints: list[Complaint] = []
    key = ""
    for line in text[found.end() :].splitlines():
        if not line.startswith(" "):
            key = line.strip()
        elif key and not line.startswith("    ") and (said := _COMPLAINT.match(line)):
            what = "" if said["type"] == _UNKNOWN else _CHOICES.sub(_each_once, said["what"])
            complaints.append(Complaint(tuple(key.split(".")), what))
            key = ""
    return complaints


def sentence_of(refusal: Refusal, deepspeed: str, known: Collection[str], slots: int) -> tuple[str, str]:
    """Returns the fault and the remedy. Known keys are suggested for one that does not exist."""
    # Batch sizes that contradict each other.
    names, value = " and ".join(refusal.keys), refusal.value
    if TRAIN_BATCH in refusal.keys and len(refusal.keys) > 1 and all(type(each) is int for each in value.values()):
        parts = " * ".join(f"{key} ({value[key]})" for key in (MICRO_BATCH, ACCUMULATION) if key in value)
        what = f"{TRAIN_BATCH} ({value[TRAIN_BATCH]}) is not {parts} {_OF_REPLICAS[0]} {slots} slot(s) allow "
        what += f"{slots} at most." if slots > 1 else "one."
        return what, f"Change one of them, or leave {TRAIN_BATCH} out: it follows from the others."
    # One key: it does not exist, or its value has the wrong form.
    if refusal.what == "":
        near = difflib.get_close_matches(names.rpartition(".")[2], known, n=1, cutoff=0.8)
        return f"{names}: {deepspeed} has no such key.", f'Did you mean "{near[0]}"?' if near else "Remove it."
    inner = None if isinstance(value, dict) else _SECTIONS.get(names.rpartition(".")[2])
    if inner is not None:
        return _no_section(names, value, inner, deepspeed)
    if isinstance(value, list):
        return _list(names, value, deepspeed)
    if isinstance(value, str) and (value.strip().lower() in ("true", "false") or _is_number(value)):
        remedy = f"Write it without quotes: {value.strip().lower()}."
        return f'{names}: {deepspeed} takes no text here, and "{value}" is one.', remedy
    # Anything else in DeepSpeed's own words.
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
    # The fault and the remedy for a value in the place of a section, such as `"optimizer": "AdamW"`.
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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# The check of a configuration by the installed DeepSpeed. DeepSpeed's own class judges, and each refusal gets its
# key.

_BATCH = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)
_MOST = 20  # refusals that are looked for, one after the other

KeyPath = tuple[str, ...]
"""A key with its sections."""


def refusals_of(ds_config: Mapping[str, Any], slots: int) -> list[Refusal]:
    """Returns the installed DeepSpeed's refusals of a configuration, as far as they concern its keys. Parts that the
    code still has to fill in ("auto", a missing batch size) do not count. The model may have any number of replicas
    that divides the slots.
    """
    return _refusals_with(ds_config, _replicas_of(slots))


def _replicas_of(slots: int) -> list[int]:
    return [size for size in range(slots, 0, -1) if slots % size == 0]


def _refusals_with(ds_config: Mapping[str, Any], sizes: list[int]) -> list[Refusal]:
    config, found = _decided(ds_config), list[Refusal]()
    with _by_itself() as replicas:
        while len(found) < _MOST:
            error = _error(config, sizes, replicas)
            paths = [] if error is None else _paths_of(config, error, sizes, replicas)
            if error is None or not paths:
                break
            found += _refusals(config, error, paths)
            config = _without(config, paths)
    return found


def refusal_behind(error: Exception, ds_config: Mapping[str, Any], slots: int) -> Refusal | None:
    """Returns the refusal behind an error of `deepspeed.initialize`; None if it is not about the configuration."""
    with contextlib.suppress(Exception):
        # DeepSpeed names its number of replicas, which the model's own parallelism may reduce.
        for size in _replicas_of(slots):
            for refusal in _refusals_with(ds_config, [size]):
                if refusal.said == _said(error):
                    return refusal
    return None


def _decided(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    config = _without_auto(ds_config)
    if any(ds_config.get(key) == "auto" for key in _BATCH):
        # The other parts have to fit the values of the code. Only their types can be checked here.
        config = {key: value for key, value in config.items() if key not in _BATCH or type(value) is not int}
    return config


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        for key, value in section.items()
        if value != "auto"
    }


@contextlib.contextmanager
def _by_itself() -> Iterator[list[int]]:
    # Makes DeepSpeed's configuration work without a process group or output. Yields the replicas, to be set.
    from deepspeed.runtime import config as module

    replicas = [1]
    names = {"get_rank": lambda *_, **__: 0, "get_world_size": lambda *_, **__: replicas[0]}
    originals = {name: getattr(module.dist, name) for name in names}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        for name, stand_in in names.items():
            setattr(module.dist, name, stand_in)
        yield replicas
    finally:
        for name, original in originals.items():
            setattr(module.dist, name, original)
        logging.disable(disabled)


def _error(config: Mapping[str, Any], sizes: list[int], replicas: list[int]) -> Exception | None:
    # DeepSpeed's error; None if it accepts the configuration for one of the numbers of replicas.
    from deepspeed.runtime.config import DeepSpeedConfig

    first: Exception | None = None
    has_size = any(config.get(key) is not None for key in (TRAIN_BATCH, MICRO_BATCH))
    for size in sizes:
        replicas[0] = size
        try:
            DeepSpeedConfig(copy.deepcopy({**config} if has_size else {**config, MICRO_BATCH: 1}))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends `deepspeed.initialize`
            first = first or error
        else:
            return None
    return first


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _paths_of(config: dict[str, Any], error: Exception, sizes: list[int], replicas: list[int]) -> list[KeyPath]:
    # The keys that cause an error; none if the error stays without any one of them.

    def lies_in(path: KeyPath) -> bool:
        other = _error(_without(config, [path]), sizes, replicas)
        return other is None or _said(other) != _said(error)

    paths: list[KeyPath] = [(key,) for key in config if lies_in((key,))]
    of_no_number = [path for path in paths if path[0] in _BATCH and type(_at(config, path)) is not int]
    if of_no_number:
        return of_no_number[:1]
    if len(paths) > 1 and (TRAIN_BATCH,) in paths:
        # Sizes contradict each other. A size that DeepSpeed would have derived belongs to the contradiction.
        return [(key,) for key in _BATCH if key in config]
    if len(paths) != 1:
        return paths
    path = paths[0]
    named = [(*path, *complaint.key) for complaint in complaints_in(str(error))]
    if named and all(_has(config, each) for each in named):
        return named
    while isinstance(_at(config, path), Mapping):
        narrower = [(*path, key) for key in _at(config, path) if lies_in((*path, key))]
        if not narrower:
            break
        path = narrower[0]
    return [path]


def _refusals(config: dict[str, Any], error: Exception, paths: list[KeyPath]) -> list[Refusal]:
    complaints = complaints_in(str(error))
    if len(paths) == len(complaints) > 0:
        pairs = zip(paths, complaints, strict=True)
        return [Refusal([".".join(path)], _at(config, path), _said(error), each.what) for path, each in pairs]
    values = {".".join(path): _at(config, path) for path in paths}
    value = next(iter(values.values())) if len(paths) == 1 else values
    return [Refusal(list(values), value, _said(error))]


def _at(config: Mapping[str, Any], path: KeyPath) -> Any:
    value: Any = config
    for key in path:
        value = value[key]
    return value


def _has(config: Mapping[str, Any], path: KeyPath) -> bool:
    try:
        _at(config, path)
    except (KeyError, TypeError):
        return False
    return True


def _without(config: dict[str, Any], paths: list[KeyPath]) -> dict[str, Any]:
    rest = copy.deepcopy(config)
    for *sections, key in paths:
        if _has(rest, (*sections, key)):
            del _at(rest, tuple(sections))[key]
    return rest
