"""Flags are made of a record's fields."""

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from pydantic import BaseModel, PositiveInt

from zerotune.flows.options import descriptions, option
from zerotune.trial_lib.records.candidate import NameOf


class Base(BaseModel):
    """What all have.

    Attributes:
        count: how many there are,
            all together.
    """

    count: PositiveInt = 3


class Record(Base):
    """What one has.

    Attributes:
        colour: of the paint.
        way: there.
        paths: to files.
        is_new: whether it is.
        limit: use so much of the paint. More is no use. Default: what fits.
    """

    colour: Annotated[str, NameOf("colour", {"red": 1, "blue": 2})] = "red"
    way: Literal["up", "down"] = "up"
    paths: tuple[Path, ...] = ()
    is_new: bool = False
    limit: float | None = None


def flag(field: str, *flags: str, **more: Any) -> click.Option:
    @option(Record, field, *flags, **more)
    def command(**_: object) -> None:
        pass

    (made,) = command.__click_params__  # type: ignore[attr-defined]
    assert isinstance(made, click.Option)
    return made


def test_every_field_is_described_by_a_sentence_also_one_that_is_inherited() -> None:
    assert descriptions(Record)["count"] == "How many there are, all together."
    assert descriptions(Record)["colour"] == "Of the paint."


def test_defaults_and_names_are_the_fields() -> None:
    made = flag("count")
    assert (made.name, made.opts, made.default, made.show_default) == ("count", ["--count"], 3, True)
    assert flag("count", "-c", "--number").opts == ["-c", "--number"]


@pytest.mark.parametrize(("field", "choices"), [("colour", ["red", "blue"]), ("way", ["up", "down"])])
def test_a_field_of_names_is_a_choice(field: str, choices: list[str]) -> None:
    kind = flag(field).type
    assert isinstance(kind, click.Choice)
    assert list(kind.choices) == choices


def test_lists_may_be_repeated_and_switches_take_no_value() -> None:
    assert flag("paths").multiple
    assert flag("is_new").is_flag


def test_a_field_that_may_be_left_out_shows_no_default() -> None:
    made = flag("limit")
    assert made.type is click.FLOAT
    assert not made.show_default
    said = "Use so much of the paint. More is no use."
    assert made.help == f"{said}  [default: what fits]"
    assert flag("limit", default="as you like").help == f"{said}  [default: as you like]"
