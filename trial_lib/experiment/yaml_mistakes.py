"""The mistakes that pydantic finds in an experiment's YAML, as sentences with line and column."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trial_lib.deepspeed_config.overrides import DEEPSPEED_KEYS
from trial_lib.experiment.config import ExperimentConfig
from trial_lib.experiment.yaml_document import YamlDocument, describe
from trial_lib.wire.errors import InputError

Location = tuple[str | int, ...]


def explain(document: YamlDocument, error: ValidationError) -> list[InputError]:
    """Returns one error for each place in the document that `ExperimentConfig` refuses, in their order there."""
    # A field of several types has several complaints. The deepest one is the most precise.
    by_place: dict[Location, list[ErrorDetails]] = {}
    for complaint in error.errors(include_url=False):
        by_place.setdefault(_in_document(document.data, complaint["loc"]), []).append(complaint)
    errors = [
        _explain_one(document, place, complaints)
        for place, complaints in by_place.items()
        if not any(other[: len(place)] == place and place and other != place for other in by_place)
    ]
    return sorted(errors, key=_line_and_column)


def refuse_a_programs_own(document: YamlDocument) -> None:
    """Refuses a file of settings that a program reads itself, such as one of GPT-NeoX. It is no experiment.

    Raises:
        InputError: DeepSpeed's keys are at the top level, with dashes or underscores, and there is no experiment.
    """
    if {"entrypoint", "hyperparameters"} & document.data.keys():
        return
    found = [str(key) for key in document.data if str(key).replace("-", "_") in DEEPSPEED_KEYS]
    if found:
        raise InputError(
            f"this is a file of your program's own, with DeepSpeed's settings in it ({', '.join(found[:3])}), and no "
            "experiment.",
            where=document.where((found[0],), key=True),
            remedy="Put `zerotune tune --` before the command that reads it, such as `zerotune tune -- python deepy.py "
            f"train.py {document.path.name}`.",
        )


def _line_and_column(error: InputError) -> tuple[int, int]:
    _, line, column = error.where.rsplit(":", 2)
    return int(line), int(column)


def one_error(errors: Sequence[InputError], path: Path) -> InputError:
    """Returns one error that lists all of them; a single one unchanged."""
    if len(errors) == 1:
        return errors[0]
    listed = "\n".join(f"  {error}" for error in errors)
    return InputError(f"{len(errors)} mistakes:\n{listed}\n", where=str(path), remedy="Mend each of them.")


def _in_document(data: Any, loc: Location) -> Location:
    """Returns the part of pydantic's location that is in the document. The rest names types and validators."""
    place: list[str | int] = []
    for step in loc:
        known = step in data if isinstance(data, dict) else isinstance(data, list) and step in range(len(data))
        if known:
            data = data[step]
            place.append(step)
    return tuple(place)


def _explain_one(document: YamlDocument, place: Location, complaints: list[ErrorDetails]) -> InputError:
    first = complaints[0]
    kind, name = first["type"], ".".join(str(step) for step in place)
    at_key = kind == "extra_forbidden" or first["loc"][-1:] == ("[key]",)
    where = document.where(place, key=at_key)
    if kind == "extra_forbidden":
        return InputError(f'unknown key "{name}".', where=where, remedy=_where_it_belongs(place))
    if kind == "missing":  # of the required fields there is one
        return InputError('"entrypoint" is missing.', where=where, remedy="Add it: `entrypoint: python3 train.py`.")
    if "remedy" in first.get("ctx", {}):
        return InputError(f"{name}: {first['msg']}.", where=where, remedy=first["ctx"]["remedy"])
    if kind == "value_error":
        what = str(first["ctx"]["error"])
        return InputError(f"{name}: {what}." if name else f"{what}.", where=where, remedy="Change it.")
    expected = " or ".join(dict.fromkeys(_expected(complaint) for complaint in complaints))
    found = place[-1] if at_key else first["input"]
    as_text = "text" in expected and isinstance(found, (bool, int, float))
    return InputError(
        f"{name}: expected {expected}, found {describe(found)}.",
        where=where,
        remedy="Put it in quotes." if as_text else "Change it.",
    )


_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "byte_size": "a size such as 2 GiB",
    "byte_size_unit": "a size such as 2 GiB",
    "string_pattern_mismatch": "a flag such as --batch-size or the name of an environment variable",
    "recursion_loop": "a value that does not hold itself",
    "invalid-json-value": "text, a number, true, false, a list or a mapping",
}


def _expected(complaint: ErrorDetails) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    return _EXPECTED.get(kind, complaint["msg"])


def _where_it_belongs(place: Location) -> str:
    key, known = str(place[-1]), list(_section(place[:-1]).model_fields)
    nearest = difflib.get_close_matches(key, known, n=1)
    if nearest:
        return f'Did you mean "{nearest[0]}"?'
    if len(place) > 1 and key in ExperimentConfig.model_fields:
        return "It belongs at the top level."
    owner = next((name for name in ExperimentConfig.model_fields if key in _section((name,)).model_fields), None)
    if owner is not None:
        return f'It belongs under "{owner}".'
    return f"Known here: {', '.join(known)}. Values of your own stand under hyperparameters."


def _section(place: Location) -> type[BaseModel]:
    """Returns the model of the section at a place; one without fields for a plain value."""
    section: type[BaseModel] = ExperimentConfig
    for step in place:
        annotation = section.model_fields[str(step)].annotation
        kinds = [annotation, *get_args(annotation)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return section
