"""The values that a program's own parser has read, for the options that a search varies."""

import argparse
import enum

import pytest

from zerotune.trial_lib.rank import batch_source
from zerotune.trial_lib.rank.batch_source import values_read
from zerotune.trial_lib.rank.program_facts import ProgramFacts


class Kernel(enum.Enum):
    FAST = "fast"


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    original = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(batch_source, "_parsed", [])
    monkeypatch.setattr(batch_source, "_values", {})
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", original)
    batch_source.note_parsers()


def parse(*words: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--grad-clip", "-g", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kernel", type=Kernel, default=Kernel.FAST)
    parser.add_argument("--token", default="hf_secret")
    parser.add_argument("--nothing")
    parser.parse_args(words)


def test_an_option_that_was_not_typed_has_its_default():
    parse("--workers", "4")
    names = (
        "--attention",
        "--grad_clip",
        "-g",
        "--workers",
        "--compile",
        "--pin",
        "--kernel",
        "--nothing",
        "--unknown",
    )
    assert values_read(names) == {
        "--attention": "sdpa",
        "--grad_clip": 1.0,
        "-g": 1.0,
        "--workers": 4,
        "--compile": False,
        "--pin": True,
        "--kernel": "fast",
    }


def test_only_what_is_asked_for_leaves_the_rank():
    parse()
    facts = ProgramFacts()
    facts.note(switches=values_read(["--attention"]))
    assert "hf_secret" not in str(facts.to_json())
    assert facts.to_json()["switches"] == {"--attention": "sdpa"}
