"""The `search_space` of an experiment: knobs that the user narrows, widens or fixes, and the program's switches."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import LAYOUT_KINDS, VARIABLES_OF_LAYOUTS, size_of
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, DEEPSPEED_KEYS, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.deepspeed_config.rules import ZERO_KEYS
from zerotune.trial_lib.inputs.entrypoint import CONFIG_FLAGS, Entrypoint
from zerotune.trial_lib.inputs.places import (
    MAPPING_TARGET,
    PLACES,
    is_plain_name,
    is_variable,
    same_place,
    typed_as,
    typed_switch,
)
from zerotune.trial_lib.inputs.yaml_document import describe, parse_yaml
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.turned import TURNED, TURNED_PLACE, is_turned
from zerotune.trial_lib.records.switches import PROGRAM, is_option, is_switch, path_of, place_of, text_of
from zerotune.trial_lib.search.arms import RequestedKnob
from zerotune.trial_lib.search.catalogue import KNOBS, catalogues_name, is_coarse
from zerotune.trial_lib.search.effects import Kind, shown
from zerotune.trial_lib.search.knobs import STAGE, ZERO_STAGES

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
    of_program = section.get(PROGRAM)
    # A section of another type is refused below.
    switches = coarse_switches(of_program if isinstance(of_program, Mapping) else {})
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
            # Of the condition's switch. None is the value that was typed.
            tried = requests[path].values if path in requests else (None,)
            if None not in tried and not set(map(repr, values)) & set(map(repr, tried)):
                shown_values = " or ".join(text_of(value) for value in values)
                raise InputError(
                    f"{place_of(path)} is never {shown_values}, so this condition cannot be met.",
                    where=where((_SECTION, PROGRAM, name)),
                    remedy=f"Its values are {', '.join(text_of(value) for value in tried)}.",
                )
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
        is_twice = any(type(other) is type(checked) and other == checked for other in values)
        if is_switch(path) and (is_twice or _reads_alike(checked, values)):
            same = "its value as typed" if checked is None else text_of(checked)
            raise InputError(
                f"{place_of(path)} has {same} twice.", where=where(place), remedy="Leave one of the two out."
            )
        if not is_twice:
            values.append(checked)
    return tuple(values)


def _reads_alike(value: Any, others: Sequence[Any]) -> bool:
    # Whether a program reads a value as one of the others, such as 1 and "1".
    plain = [str(other) for other in others if other is not None and not isinstance(other, bool)]
    return value is not None and not isinstance(value, bool) and str(value) in plain


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
        if place_of(key) in switches:
            other = path_of(place_of(key))
        elif is_option(key) or is_switch(key):
            what = f"{place_of(key)} is not varied."
            raise InputError(what, where=where((*place, key)), remedy=f"Name it in `{PROGRAM}` as well.")
        else:
            other = _path(key, where((*place, key)))
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


# The switches of `--vary`.

_PAIRS = (("[", "]"), ("{", "}"), ("(", ")"))
_ITEM = re.compile(r"""\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>[^,'"]*?))\s*(?:,|$)""")
_SAID = "Write the place, `=` and its values, such as `--vary '--gradient_checkpointing=true,false'`."
_MAPPED = "Write such as `--vary 'OMP_NUM_THREADS={values: [1, 2], coarse: true}'`, or the values with commas alone."


def read_vary(words: Sequence[str]) -> dict[str, Any]:
    """Returns `--vary PLACE=VALUES` as the section `program` of a YAML file; an empty one without words.
    Raises InputError: a word has no values, or the section has a mistake.

    Args:
        words: `PLACE=VALUES`, with values and commas, or `PLACE={...}`, with a mapping as in the YAML. A switch that
            ZeroTune turns needs no values.

    Example:
        >>> read_vary(["--compile=true,false", "OMP_NUM_THREADS={values: [1, 2], coarse: true}"])
        {'--compile': [True, False], 'OMP_NUM_THREADS': {'values': [1, 2], 'coarse': True}}
    """
    section: dict[str, Any] = {}
    for word in words:
        place, equals, text = word.partition("=")
        where = f"--vary {word}"
        if place and not equals and not is_turned(place):
            raise InputError(f"{place} has no values.", where=where, remedy=_SAID)
        check_place(place, list(section), where)
        if not equals:
            section[place] = list(TURNED[place].values)
            continue
        section[place] = _mapping(text, where) if text.startswith("{") else _listed(text, place, where)

    def named(keys: Sequence[str]) -> str:
        return f"--vary {keys[2]}" if len(keys) > 2 else "--vary"

    if section:
        read_search_space({PROGRAM: section}, named)
    return section


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_yaml(text, Path("--vary")).data
    except InputError as error:
        raise InputError(error.what, where=where, remedy=_MAPPED) from None


def _listed(text: str, place: str, where: str) -> list[Any]:
    values: list[Any] = []
    position = 0
    while position < len(text) or not values:
        item = _ITEM.match(text, position)
        if item is None:
            raise InputError(f"{text} has an open quote.", where=where, remedy="Close it.")
        quoted = item["single"] if item["single"] is not None else item["double"]
        if quoted is None and any(
            item["plain"].count(opened) != item["plain"].count(closed) for opened, closed in _PAIRS
        ):
            what = f"{item['plain']} has a bracket without its other half."
            raise InputError(
                what, where=where, remedy="Write values with commas alone, and quote one that has a comma."
            )
        values.append(_value(item["plain"], place) if quoted is None else quoted)
        if item.end() == len(text) and not item[0].endswith(","):
            break
        position = item.end()
    return values


def _value(word: str, place: str) -> Any:
    # The value that a word means. A number or a boolean keeps the text that it has.
    if word in ("", "null"):
        return None
    if (is_option(place) or is_turned(place)) and word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        try:
            if str(number(word)) == word:
                return number(word)
        except ValueError:
            continue
    return word


# The section `program`: switches of the program, and their check against the command.

# The keys of a switch that a DeepSpeed setting has not.
COARSE, MATHEMATICS, LAYOUT_KIND = "coarse", "changes_mathematics", "layout"

# Variables that a rank gets from its launcher, here from ZeroTune.
_OF_RANKS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
)


def coarse_switches(section: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the places of a section `program`, and whether each decides memory or mathematics.

    An environment variable does not, unless it says so, or unless it is a layout. Everything else does, unless it says
    that it does not. Of switches that ZeroTune turns, the table `TURNED` decides.
    """
    says = {
        place: said.get(COARSE, True if LAYOUT_KIND in said else None) if isinstance(said, Mapping) else None
        for place, said in section.items()
    }

    def by_default(place: str) -> bool:
        return TURNED[place].coarse if is_turned(place) else not is_plain_name(place) or place in VARIABLES_OF_LAYOUTS

    return {place: by_default(place) if coarse is None else bool(coarse) for place, coarse in says.items()}


def check_place(place: str, others: Sequence[str], where: str) -> None:
    """Raises InputError: it is no place in a command, or another name of one before it."""
    if re.fullmatch(TURNED_PLACE, place):
        if not is_turned(place):
            near = difflib.get_close_matches(place, TURNED, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Name one of {', '.join(TURNED)}."
            raise InputError(f"ZeroTune has no switch {place}.", where=where, remedy=remedy)
    elif not re.fullmatch(MAPPING_TARGET, place):
        raise InputError(f'"{place}" is no place in a command.', where=where, remedy=f"Name {PLACES}.")
    if any(same_place(place, other) for other in others):
        raise InputError(f"{place} is varied twice.", where=where, remedy="Leave one of the two out.")


def check_value(place: str, value: Any, where: str) -> None:
    """Raises InputError: it is no text, number or boolean, or none of those of a switch that ZeroTune turns."""
    if isinstance(value, (list, Mapping)):
        raise InputError(
            f"{place}: a value is one word of the command.", where=where, remedy="Write a text, a number or true."
        )
    is_word = value is None or isinstance(value, (bool, int, float, str))
    if not is_word or (isinstance(value, float) and not math.isfinite(value)):
        what = f"{place}: {describe(value)} is no text, and no number that has one spelling."
        raise InputError(what, where=where, remedy="Put it in quotes.")
    if is_turned(place) and value is not None and not TURNED[place].has(value):
        known = ", ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in TURNED[place].values)
        raise InputError(f"{place} cannot be {value}.", where=where, remedy=f"Its values are {known}.")


def check_layout(request: RequestedKnob, others: Sequence[RequestedKnob], where: str) -> None:
    """Raises InputError: the kind is unknown or is there twice, the switch is not coarse, or a value is no size."""
    place, kind = place_of(request.path), request.layout
    if kind not in LAYOUT_KINDS:
        known = f"{', '.join(LAYOUT_KINDS[:-1])} or {LAYOUT_KINDS[-1]}"
        raise InputError(f"{kind!r} is no layout.", where=where, remedy=f"Write {known}.")
    other = next((place_of(each.path) for each in others if each.layout == kind), None)
    if other is not None:
        raise InputError(
            f"{place} and {other} are both the {kind} layout.", where=where, remedy="Name one switch for it."
        )
    if is_turned(place) or not request.is_coarse:
        raise InputError(
            f"{place} cannot be a layout: the size of groups decides memory.", where=where, remedy="Leave one key out."
        )
    wrong = next((value for value in request.values if value is not None and not size_of(value)), None)
    if wrong is not None:
        what = f"{place}: a layout is a number of ranks, and {wrong!r} is none."
        raise InputError(what, where=where, remedy="Write whole numbers from 1 on.")


def check_switches(
    requests: Sequence[RequestedKnob],
    entrypoint: Entrypoint,
    environment: Mapping[str, str],
    arg_mappings: Mapping[Any, str],
    folder: Path,
) -> None:
    """Raises InputError: a switch names nothing in the command where it has to, or what ZeroTune itself sets."""
    for request in requests:
        if is_switch(request.path):
            place = place_of(request.path)
            if is_turned(place):
                continue
            _check_owner(place, entrypoint, arg_mappings)
            refuse_launchers_own([place], entrypoint)
            _check_name(place, entrypoint, environment)
            typed_switch(place, request.values, entrypoint.arguments, environment, folder)


def refuse_launchers_own(places: Iterable[str], entrypoint: Entrypoint) -> None:
    """Refuses environment variables whose value the ranks of a training would not get from the launcher.

    A trial's ranks get it from ZeroTune, so a study would promise what the answer's command does not do. Raises
    InputError: the launcher sets a variable itself, or does not hand it on.
    """
    for place in places:
        if not is_variable(place, entrypoint.arguments) or place in entrypoint.config_variables:
            continue
        if place in entrypoint.launcher_environment and place not in entrypoint.launcher_defaults:
            what = f"the launcher itself sets {place} for each rank, so no value before the command would count."
            remedy = f"Leave it out of the launcher's options and files, and write {place}=... before the command."
            raise InputError(what, where=place, remedy=remedy)
        if not any(fnmatchcase(place, pattern) for pattern in entrypoint.passed_variables):
            several = " of several hosts" if entrypoint.hosts else ""
            raise InputError(
                f"the launcher does not hand {place} to the ranks{several}.",
                where=place,
                remedy="Tune it on one host, without the hostfile."
                if entrypoint.hosts
                else f"Have the launcher's options hand on all variables, or {place} by its name.",
            )


def refuse_mapped(places: Sequence[str], arg_mappings: Mapping[Any, str]) -> None:
    for place in places:
        key = next((key for key, target in arg_mappings.items() if same_place(place, target)), None)
        if key is not None:
            what = f"{place} sets {key}, and the search itself chooses the batch."
            remedy = "Leave it out. Bound the sizes by --max-micro-batch, or free the batch by --free-batch."
            raise InputError(what, where=place, remedy=remedy)


def _check_owner(place: str, entrypoint: Entrypoint, arg_mappings: Mapping[Any, str]) -> None:
    refuse_mapped([place], arg_mappings)
    if place in CONFIG_FLAGS or place in entrypoint.config_variables:
        what = f"{place} names the DeepSpeed configuration, which each trial has its own of."
        raise InputError(what, where=place, remedy="Name its settings in search_space instead.")
    if place in _OF_RANKS or same_place(place, "--local_rank"):
        raise InputError(f"ZeroTune itself sets {place} for each rank.", where=place, remedy="Leave it out.")
    if is_option(place) and typed_as(place, entrypoint.launcher) and not typed_as(place, entrypoint.arguments):
        what = f"{place} is an option of the launcher, and ZeroTune starts the ranks in its place."
        raise InputError(what, where=place, remedy="Vary an option of the program.")


def _check_name(place: str, entrypoint: Entrypoint, environment: Mapping[str, str]) -> None:
    variable = is_variable(place, entrypoint.arguments)
    if entrypoint.trial_class is not None and not variable:
        what = f"{entrypoint.trial_class} is a trial class, which has no command line."
        raise InputError(what, where=place, remedy="Vary an environment variable, which it can read.")
    if not variable and catalogues_name(place) in (STAGE, *KNOBS) and not typed_as(place, entrypoint.arguments):
        what = f"{place} is a setting of DeepSpeed, which a search varies without this."
        remedy = f"Name it in search_space of a YAML to bound it, or write ++{place} for an override."
        raise InputError(what, where=place, remedy=remedy)
    if variable and place != place.upper() and place not in environment:
        what = f"the command has no argument {place}=..., and no environment variable has this name."
        raise InputError(what, where=place, remedy=f"Write --{place} for an option, or ++{place} for an override.")
