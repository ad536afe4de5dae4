"""What a program's own parser would refuse of the options that a search varies."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import pytest

from zerotune.trial_lib.rank import batch_source
from zerotune.trial_lib.rank.program_facts import refused_options

Parse = Callable[[argparse.ArgumentParser], Any]


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = argparse.ArgumentParser.parse_known_args
    for name in ("_parsed", "parsers_used"):
        monkeypatch.setattr(batch_source, name, [])
    monkeypatch.setattr(batch_source, "_values", {})
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", original)
    monkeypatch.setattr(sys, "argv", ["train.py", "--loss-scale", "2", "--pin", "True"])
    batch_source.note_parsers()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--kernel", choices=["relu", "gelu"], default="relu")
    made.add_argument("--grad-clip", type=float, default=1.0)
    made.add_argument("--loss-scale", type=int)
    made.add_argument("--compile", action="store_true")
    made.add_argument("--pin")
    made.add_argument("--file", type=argparse.FileType("w"))
    made.add_argument("--grad-clip-by")
    return made


def refused(name: str, *values: Any, parse: Parse = argparse.ArgumentParser.parse_args) -> str:
    parse(parser())
    return refused_options({name: values}, batch_source.parsers_used).get(name, "")


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "--kernel",
            ("relu", "none"),
            "your program refuses a value of --kernel: argument --kernel: invalid choice: 'none'",
        ),
        ("--grad-clip", (1.0, "much"), "argument --grad-clip: invalid float value: 'much'"),
        ("--kernels", ("relu",), "your program has no option --kernels, and --kernel is the nearest"),
        ("--zzz", (True, False), "your program has no option --zzz"),
        # Only a Trainer's parser takes both spellings, and the user has typed none.
        ("--grad_clip", (1.0,), "your program has no option --grad_clip, and --grad-clip is the nearest"),
        ("--compile", ("yes", "no"), "--compile takes no word behind it, and yes is one"),
        ("--kernel", (True, False), "--kernel needs a word behind it"),
    ],
)
def test_what_the_parser_would_refuse_is_told_with_its_own_words(name: str, values: Any, said: str) -> None:
    assert said in refused(name, *values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("--kernel", (None, "gelu")),
        ("--grad-clip", (0.5, "1e-3")),
        ("--compile", (True, False)),
        ("--kern", ("gelu",)),
        ("--loss_scale", (1, 2)),
        ("--pin", (True, False)),
        ("--file", ("never-opened",)),
    ],
)
def test_what_the_parser_takes_is_not_told(name: str, values: Any) -> None:
    assert refused(name, *values) == ""


def test_a_program_that_leaves_unknown_options_to_others_may_have_any() -> None:
    assert refused("--kernels", "relu", parse=argparse.ArgumentParser.parse_known_args) == ""


def test_a_parser_of_other_words_is_not_that_of_the_command_line() -> None:
    assert refused("--kernels", "relu", parse=lambda each: each.parse_args(["--kernel", "gelu"])) == ""
    assert batch_source.parsers_used == []


def test_a_subcommand_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--depth", "2"])
    made = argparse.ArgumentParser()
    made.add_subparsers().add_parser("fit").add_argument("--depth", type=int)
    made.parse_args()
    parsers = batch_source.parsers_used
    assert refused_options({"--depth": [1, 2]}, parsers) == {}
    assert refused_options({"--rows": [1, 2]}, parsers) == {"--rows": "your program has no option --rows"}
    assert "invalid int value" in refused_options({"--depth": [1, "deep"]}, parsers)["--depth"]
