"""Flags made from the fields of a record. Their names, types, defaults and help equal those of Prefect's form."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trial_lib.records.named import NameOf

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_NAME = re.compile(r"    (\w+): ")
# A description ends with this if it describes the default of a field whose value is None.
_OTHERWISE = re.compile(r"(.*) Default: (.*)\.", re.DOTALL)


class FlagWithOlderNames(click.Option):
    """An option that older spellings give as well. The help does not list them.

    Args:
        *arguments: of click's option.
        older: the older spellings.
        **options: of click's option.
    """

    def __init__(self, *arguments: Any, older: Sequence[str] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.older = older

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Adds the option to a command's parser."""
        super().add_to_parser(parser, ctx)
        if self.older:
            parser.add_option(obj=self, opts=list(self.older), dest=self.name, action="store")


def option(
    model: type[BaseModel],
    field: str,
    *flags: str,
    default: str | None = None,
    more: str = "",
    older: Sequence[str] = (),
) -> Decorator:
    """Returns the flag of one field.

    Args:
        model: the record, whose docstring describes its fields.
        field: the field's name.
        flags: the flag's spellings. Without any it is `--` and the field's name.
        default: the default to show in the help, if the record computes it.
        more: a sentence to add to the field's description.
        older: spellings that still work, and that the help does not list. They take a value.
    """
    said, otherwise = _said_of(model, field)
    help_text, told_default = f"{said} {more}".rstrip(), default or otherwise
    options, value = _kind_of(_annotation(model, field)), model.model_fields[field].default
    if told_default:
        help_text += f"  [default: {told_default}]"
    elif value not in (None, PydanticUndefined, ()) and not options.get("is_flag"):
        options |= {"default": value, "show_default": True}
    names = flags or (f"--{field.replace('_', '-')}",)
    return click.option(*names, field, cls=FlagWithOlderNames, older=older, help=help_text, **options)


def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the description of each field, from the docstrings of a record and of its base classes."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        lines = (inspect.getdoc(each) or "").partition("Attributes:\n")[2].splitlines()
        name = ""
        for line in lines:
            named = _NAME.match(line)
            if named:
                name = named[1]
                found[name] = line[named.end() :]
            elif name and line.strip():
                found[name] += f" {line.strip()}"
    return {name: f"{text[0].upper()}{text[1:].rstrip('.')}." for name, text in found.items()}


def _said_of(model: type[BaseModel], field: str) -> tuple[str, str]:
    """Returns a field's description, and separately its part about the default."""
    description = descriptions(model)[field]
    parted = _OTHERWISE.fullmatch(description)
    return (description, "") if parted is None else (parted[1], parted[2])


def _annotation(model: type[BaseModel], field: str) -> Any:
    """Returns the annotation of a field, with its metadata."""
    return next(each.__annotations__[field] for each in model.__mro__ if field in vars(each).get("__annotations__", {}))


def _kind_of(annotation: Any) -> dict[str, Any]:
    """Returns click's options for a field of this type."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        names = next((each for each in metadata if isinstance(each, NameOf)), None)
        return {"type": click.Choice(list(names.table))} if names is not None else _kind_of(inner)
    if get_origin(annotation) in (Union, UnionType):
        return _kind_of(next(each for each in get_args(annotation) if each is not NoneType))
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        numbers = [value for value in values if isinstance(value, int)]
        return {"type": click.IntRange(min(numbers), max(numbers)) if numbers else click.Choice(values)}
    if get_origin(annotation) is tuple:
        return {**_kind_of(get_args(annotation)[0]), "multiple": True}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": click.Path(path_type=Path) if annotation is Path else annotation}
