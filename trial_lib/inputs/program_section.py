"""The switches of `search_space`: its section `program`, `--vary`, and their check against the command."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.layout import LAYOUT_KINDS, VARIABLES_OF_LAYOUTS, size_of
from trial_lib.inputs.entrypoint import CONFIG_FLAGS, Entrypoint
from trial_lib.inputs.places import (
    MAPPING_TARGET,
    PLACES,
    is_plain_name,
    is_variable,
    same_place,
    typed_as,
    typed_switch,
)
from trial_lib.inputs.yaml_document import describe, parse_yaml
from trial_lib.messages.errors import InputError
from trial_lib.messages.turned import TURNED, TURNED_PLACE, is_turned
from trial_lib.records.switches import PROGRAM, is_option, is_switch, path_of, place_of, text_of
from trial_lib.search.arms import RequestedKnob
from trial_lib.search.catalogue import KNOBS, catalogues_name
from trial_lib.search.knobs import STAGE

# The keys of a switch that a DeepSpeed setting has not.
COARSE, MATHEMATICS, LAYOUT_KIND = "coarse", "changes_mathematics", "layout"

# Variables that a rank gets from its launcher, here from ZeroTune.
_OF_RANKS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
)
_PAIRS = (("[", "]"), ("{", "}"), ("(", ")"))
_ITEM = re.compile(r"""\s*(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>[^,'"]*?))\s*(?:,|$)""")
_SAID = "Write the place, `=` and its values, such as `--vary '--gradient_checkpointing=true,false'`."
_MAPPED = "Write such as `--vary 'OMP_NUM_THREADS={values: [1, 2], coarse: true}'`, or the values with commas alone."


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


def check_once(place: str, value: Any, others: Sequence[Any], where: str) -> None:
    """Raises InputError: the program reads the value as one before it."""
    plain = [str(other) for other in others if other is not None and not isinstance(other, bool)]
    is_twice = any(type(other) is type(value) and other == value for other in others)
    if is_twice or (value is not None and not isinstance(value, bool) and str(value) in plain):
        shown = "its value as typed" if value is None else text_of(value)
        raise InputError(f"{place} has {shown} twice.", where=where, remedy="Leave one of the two out.")


def check_condition(place: str, values: Sequence[Any], tried: Sequence[Any], where: str) -> None:
    """`tried` are the values of the condition's switch, None for the one that was typed.
    Raises InputError: the switch has none of the condition's values.
    """
    if None not in tried and not set(map(repr, values)) & set(map(repr, tried)):
        shown = " or ".join(text_of(value) for value in values)
        what = f"{place} is never {shown}, so this condition cannot be met."
        raise InputError(what, where=where, remedy=f"Its values are {', '.join(text_of(value) for value in tried)}.")


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


def read_vary(words: Sequence[str], check: Callable[[Mapping[str, Any], Callable[..., str]], Any]) -> dict[str, Any]:
    """Returns `--vary PLACE=VALUES` as the section `program` of a YAML file.
    Raises InputError: a word has no values, or the section has a mistake.

    Args:
        words: `PLACE=VALUES`, with values and commas, or `PLACE={...}`, with a mapping as in the YAML. A switch that
            ZeroTune turns needs no values.
        check: checks a `search_space`. It gets the function that names a place in an error.

    Example:
        >>> read_vary(["--compile=true,false", "OMP_NUM_THREADS={values: [1, 2], coarse: true}"], lambda *_: None)
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

    check({PROGRAM: section}, named)
    return section


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_yaml(text, "--vary").data
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


def section_of(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leaves out the mistakes of its type."""
    said = section.get(PROGRAM)
    return said if isinstance(said, Mapping) else {}


def path_in(key: str, switches: Mapping[str, bool], where: str) -> str | None:
    """Returns the path of a switch that a condition names by its place, or by its path; None for any other key.
    Raises InputError: it is an option, or a path in `program`, that is not varied.
    """
    if place_of(key) in switches:
        return path_of(place_of(key))
    if is_option(key) or is_switch(key):
        raise InputError(f"{place_of(key)} is not varied.", where=where, remedy=f"Name it in `{PROGRAM}` as well.")
    return None
