"""The experiment's `search_space`: the knobs that the user narrows, widens or fixes, and the program's switches."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from trial_lib.deepspeed_config.layout import VARIABLES_OF_LAYOUTS
from trial_lib.deepspeed_config.overrides import ACCUMULATION, DEEPSPEED_KEYS, MICRO_BATCH, TRAIN_BATCH
from trial_lib.deepspeed_config.rules import ZERO_KEYS
from trial_lib.inputs.program_section import (
    COARSE,
    LAYOUT_KIND,
    MATHEMATICS,
    check_condition,
    check_layout,
    check_once,
    check_place,
    check_value,
    coarse_switches,
    path_in,
    section_of,
)
from trial_lib.inputs.yaml_document import describe
from trial_lib.messages.errors import InputError
from trial_lib.records.switches import PROGRAM, is_switch, path_of, place_of
from trial_lib.search.arms import RequestedKnob
from trial_lib.search.catalogue import KNOBS, catalogues_name, is_coarse
from trial_lib.search.effects import Kind, shown
from trial_lib.search.knobs import STAGE, ZERO_STAGES

# Returns how an error names a place in the experiment, by its keys from the top.
Where = Callable[[tuple[str, ...]], str]

_SECTION = "search_space"
_RANGE = ("min", "max", "log", "count")
_DEFAULT_COUNT = 5
# A study has 50 trials by default. Each value of a coarse switch needs trials of its own, at each ZeRO stage, and more
# values of a fine one lie closer together than a study can tell apart.
_MOST_VALUES = 100
_BATCH = {
    MICRO_BATCH: "Bound the sizes by --max-micro-batch, or keep to multiples by --divisible-by.",
    TRAIN_BATCH: "Set the batch by --train-batch-size, or free it by --free-batch.",
    ACCUMULATION: "It follows from the batch: set that by --train-batch-size, or free it by --free-batch.",
}
_OFFLOAD_KEYS = frozenset(
    ("buffer_count", "buffer_size", "cpuadam_cores_perc", "device", "fast_init", "max_in_cpu", "nvme_path")
) | {"pin_memory", "pipeline_read", "pipeline_write", "ratio", "super_offload"}
_DEPRECATED = {
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param.device",
}


def read_search_space(section: Mapping[str, Any], where: Where = ".".join) -> tuple[RequestedKnob, ...]:
    """Returns the user's requests, in the section's order. Raises InputError: the section has a mistake.

    Args:
        section: dotted DeepSpeed key to a value, a list of values, or a mapping with `values` or a range (`min`, `max`,
            and optionally `log` and `count`), and optionally `when`. The key `program` has the same for the program's
            switches, by their places, each optionally with `coarse`, `changes_mathematics` and `layout`.

    Example:
        >>> read_search_space({"zero_optimization.reduce_bucket_size": {"min": 1000000, "max": 4000000, "count": 3}})
        (RequestedKnob(path='zero_optimization.reduce_bucket_size', values=(1000000, 2500000, 4000000), when={}),)
    """
    requests: dict[str, RequestedKnob] = {}
    switches = coarse_switches(section_of(section))
    for key, said in section.items():
        place = (_SECTION, key)
        if key == PROGRAM:
            requests |= _read_program(said, switches, where)
            continue
        path = _path(key, where(place))
        if path in requests:
            raise InputError(
                f"{key} is another name of a knob that is already here.", where=where(place), remedy="Keep one."
            )
        requests[path] = _request(path, said, place, where, switches)
    return tuple(requests.values())


def _read_program(said: Any, switches: Mapping[str, bool], where: Where) -> dict[str, RequestedKnob]:
    if not isinstance(said, Mapping):
        what = f"{PROGRAM}: expected a mapping, found {describe(said)}."
        remedy = "Write such as `program: {--gradient_checkpointing: [true, false]}`."
        raise InputError(what, where=where((_SECTION, PROGRAM)), remedy=remedy)
    requests: dict[str, RequestedKnob] = {}
    for name, values in said.items():
        place = (_SECTION, PROGRAM, name)
        check_place(name, [place_of(path) for path in requests], where(place))
        request = _request(path_of(name), values, place, where, switches)
        if all(value is None for value in request.values):
            raise InputError(f"{name} has no value but that as typed.", where=where(place), remedy="Name another.")
        request = replace(request, coarse=switches[name])
        if request.layout:
            check_layout(request, tuple(requests.values()), where((*place, LAYOUT_KIND)))
        requests[request.path] = request
    _check_combinations(requests.values(), where((_SECTION, PROGRAM)))
    for name, request in zip(said, requests.values(), strict=True):
        for path, values in request.when.items():
            if path in requests:
                check_condition(place_of(path), values, requests[path].values, where((_SECTION, PROGRAM, name)))
    return requests


def _check_combinations(requests: Iterable[RequestedKnob], where: str) -> None:
    # Checks that the coarse switches have no more combinations than a search can try.
    varied = [request for request in requests if request.is_coarse and len(request.values) > 1]
    count = math.prod(len(request.values) for request in varied)
    if count > _MOST_VALUES:
        names = ", ".join(place_of(request.path) for request in varied)
        what = f"{names} have {count} combinations at each ZeRO stage, and a search can try {_MOST_VALUES}."
        remedy = "Name fewer values, or write `coarse: false` at a switch that changes neither memory nor losses."
        raise InputError(what, where=where, remedy=remedy)


def _check_number(path: str, count: int, where: str) -> None:
    # Checks that a knob has no more values than a search can try.
    if count > _MOST_VALUES:
        what = f"{place_of(path)} has {count} values, and a search can try {_MOST_VALUES}."
        raise InputError(what, where=where, remedy="Name fewer, or write a range with a smaller `count`.")


def _path(key: str, where: str) -> str:
    # The catalogue's name of a setting. A name that DeepSpeed does not have is refused.
    if key in _BATCH:
        raise InputError(f"{key} is no knob: the search itself chooses the batch.", where=where, remedy=_BATCH[key])
    if key in _DEPRECATED:
        raise InputError(f"{key} is deprecated.", where=where, remedy=f"Name {_DEPRECATED[key]}.")
    path = catalogues_name(key)
    if path in KNOBS or path == STAGE:
        return path
    inside = next((known for known in (STAGE, *KNOBS) if known.startswith(f"{path}.")), None)
    if inside is not None:
        raise InputError(f"{key} is a section.", where=where, remedy=f"Name a setting in it, such as {inside}.")
    *sections, name = path.split(".")
    parent = ".".join(sections)
    beside = {"": DEEPSPEED_KEYS, "zero_optimization": ZERO_KEYS}.get(parent, frozenset())
    if parent in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        beside = _OFFLOAD_KEYS
    if name in beside or (not beside and sections[0] in DEEPSPEED_KEYS and name):
        return path
    nearest = _nearest(key, name, parent, beside)
    if nearest is None and parent:  # it may be a newer DeepSpeed's
        return path
    raise InputError(
        f"DeepSpeed has no setting {key}.",
        where=where,
        remedy=f"Did you mean {nearest}?"
        if nearest
        else "Name one by its dotted path, such as zero_optimization.stage.",
    )


def _nearest(key: str, name: str, parent: str, beside: frozenset[str]) -> str | None:
    elsewhere = [known for known in (STAGE, *KNOBS) if known.endswith(f".{name}")]
    if elsewhere:
        return elsewhere[0]
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=0.8):
        return f"{parent}.{near[0]}" if parent else near[0]
    return next(iter(difflib.get_close_matches(key, (STAGE, *KNOBS), n=1, cutoff=0.9 if parent else 0.6)), None)


def _request(path: str, said: Any, place: tuple[str, ...], where: Where, switches: Mapping[str, bool]) -> RequestedKnob:
    known_kind = VARIABLES_OF_LAYOUTS.get(place_of(path), "") if is_switch(path) else ""
    if not isinstance(said, Mapping):
        return RequestedKnob(path, _values(path, said, place, where), layout=known_kind)
    known = ("values", "when", *_RANGE, *((COARSE, MATHEMATICS, LAYOUT_KIND) if is_switch(path) else ()))
    unknown = said.keys() - set(known)
    if unknown:
        key = min(unknown)
        near = difflib.get_close_matches(key, known, n=1)
        remedy = f'Did you mean "{near[0]}"?' if near else f"Known here: {', '.join(known[:-1])} and {known[-1]}."
        raise InputError(f'unknown key "{key}".', where=where((*place, key)), remedy=remedy)
    for key in (COARSE, MATHEMATICS):
        if not isinstance(said.get(key, False), bool):
            what = f"{key}: expected true or false, found {describe(said[key])}."
            raise InputError(what, where=where((*place, key)), remedy="Change it.")
    is_range = any(key in said for key in _RANGE)
    if is_range == ("values" in said):
        what = "both values and a range" if is_range else "neither values nor a range"
        what = f"{place_of(path)} has {what}."
        raise InputError(what, where=where(place), remedy="Write `values`, or `min` and `max`.")
    values = _range(path, said, place, where) if is_range else _values(path, said["values"], (*place, "values"), where)
    when = _when(path, said.get("when", {}), (*place, "when"), where, switches)
    kind = str(said[LAYOUT_KIND]) if LAYOUT_KIND in said else known_kind
    return RequestedKnob(path, values, when, changes_mathematics=said.get(MATHEMATICS, False), layout=kind)


def _values(path: str, said: Any, place: tuple[str, ...], where: Where) -> tuple[Any, ...]:
    listed = said if isinstance(said, list) else [said]
    if not listed:
        raise InputError(f"{place_of(path)} has no values.", where=where(place), remedy="Name at least one.")
    _check_number(path, len(listed), where(place))
    values: list[Any] = []
    for value in listed:
        checked = _checked(path, value, where(place))
        if is_switch(path):
            check_once(place_of(path), checked, values, where(place))
        if not any(type(other) is type(checked) and other == checked for other in values):
            values.append(checked)
    return tuple(values)


def _checked(path: str, value: Any, where: str) -> Any:
    # A value as DeepSpeed reads it: 5e8 is a whole number.
    if is_switch(path):
        check_value(place_of(path), value, where)
        return value
    if isinstance(value, float) and value.is_integer() and _kind(path) in ("count", "size"):
        value = int(value)
    expected = _expected(path, value)
    if expected:
        raise InputError(f"{path}: expected {expected}, found {describe(value)}.", where=where, remedy="Change it.")
    return value


def _kind(path: str) -> Kind | None:
    return KNOBS[path].kind if path in KNOBS else None


def _expected(path: str, value: Any) -> str | None:
    # The expected values in words, if a value is not one of them.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    kind = _kind(path)
    if path == STAGE:
        return None if is_number and value in ZERO_STAGES else "a ZeRO stage from 0 to 3"
    if kind == "switch":
        return None if isinstance(value, bool) else "true or false"
    if kind == "count":
        return None if is_number and value >= 0 else "a whole number from 0 on"
    if kind == "size":
        return None if is_number and value >= 1 else "a whole number from 1 on"
    if kind == "share":
        is_share = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
        return None if is_share else "a number from 0 to 1"
    if kind == "names":
        names = value if isinstance(value, list) else [value]
        return None if all(isinstance(name, str) for name in names) else "a name, or a list of names"
    if isinstance(kind, tuple):
        return None if value in kind else f"{', '.join(kind[:-1])} or {kind[-1]}"
    return "a value; the settings of a section are knobs of their own" if isinstance(value, Mapping) else None


def _range(path: str, said: Mapping[str, Any], place: tuple[str, ...], where: Where) -> tuple[Any, ...]:
    # Evenly spaced values from the least to the largest; whole numbers if both ends are.
    kind = _kind(path)
    if path == STAGE or kind not in (None, "count", "share"):
        raise InputError(f"{place_of(path)} has no range.", where=where(place), remedy="List its values.")
    low, high = (_number(path, said, key, place, where) for key in ("min", "max"))
    log, count = said.get("log", False), said.get("count", _DEFAULT_COUNT)
    if not isinstance(log, bool):
        raise InputError(
            f"log: expected true or false, found {describe(log)}.", where=where((*place, "log")), remedy="Change it."
        )
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        what = f"count: expected a whole number from 2 on, found {describe(count)}."
        raise InputError(what, where=where((*place, "count")), remedy="Change it.")
    _check_number(path, count, where((*place, "count")))
    if not low < high or (log and low <= 0):
        rule = "above 0 and below" if log else "below"
        what = f"min is {shown(low)} and max is {shown(high)}: min has to be {rule} max."
        raise InputError(what, where=where(place), remedy="Change one.")
    steps = [step / (count - 1) for step in range(count)]
    values: list[float] = [low * (high / low) ** step if log else low + (high - low) * step for step in steps]
    values[0], values[-1] = low, high
    if all(isinstance(end, int) for end in (low, high)):
        values = [round(value) for value in values]
    return tuple(_checked(path, value, where(place)) for value in dict.fromkeys(values))


def _number(path: str, said: Mapping[str, Any], key: str, place: tuple[str, ...], where: Where) -> int | float:
    if key not in said:
        raise InputError(
            f"the range of {place_of(path)} has no {key}.", where=where(place), remedy="Write `min` and `max`."
        )
    value = said[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(
            f"{key}: expected a number, found {describe(value)}.", where=where((*place, key)), remedy="Change it."
        )
    return int(value) if isinstance(value, float) and value.is_integer() and _kind(path) == "count" else value


def _when(
    path: str, said: Any, place: tuple[str, ...], where: Where, switches: Mapping[str, bool]
) -> dict[str, tuple[Any, ...]]:
    if not isinstance(said, Mapping):
        what = f"when: expected a mapping, found {describe(said)}."
        raise InputError(what, where=where(place), remedy="Write such as `when: {zero_optimization.stage: [2, 3]}`.")
    if said and path == STAGE:
        raise InputError("the ZeRO stage has no condition.", where=where(place), remedy="Leave `when` out.")
    conditions = {}
    for key, values in said.items():
        other = path_in(key, switches, where((*place, key))) or _path(key, where((*place, key)))
        is_of_arm = switches[place_of(other)] if is_switch(other) else is_coarse(other)
        if not is_of_arm or other == path:
            raise InputError(
                f"{place_of(path)} cannot depend on {key}: a condition is on the ZeRO stage, or another setting that "
                "decides memory or mathematics.",
                where=where((*place, key)),
                remedy="Take such as zero_optimization.stage or zero_optimization.offload_optimizer.device.",
            )
        conditions[other] = _values(other, values, (*place, key), where)
    return conditions
