"""Switches of a program: how a value is set in the command, and what the command as typed says of it."""

import os
from pathlib import Path

import pytest
import yaml

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.inputs.places import TrialCommand, trial_command, typed_switch
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.switches import (
    SwitchValue,
    deepspeed_part,
    path_of,
    place_of,
    shown_switch,
    switches_of,
)


def command(arguments: str, switches: dict[str, SwitchValue], folder: Path = Path(), **variables: str) -> TrialCommand:
    entrypoint = parse_entrypoint(["python", "train.py", *arguments.split()])
    return trial_command(entrypoint, folder / "trial/ds.json", {}, {}, variables, folder, switches)


FLAGS = [
    ("--gc", True, "--lr 1", "--lr 1 --gc"),
    ("--gc", True, "--lr=1", "--lr=1 --gc"),
    ("--gc", True, "run -- out", "run --gc -- out"),
    ("--gc", True, "--gc out", "--gc out"),
    ("--gc", False, "--gc out", "out"),
    ("--gc", False, "out --gc", "out"),
    ("--gc", False, "--lr 1", "--lr 1"),
    ("--grad-gc", False, "--grad_gc --x", "--x"),
    ("--gc", False, "--gc True", "--gc False"),
    ("--gc", True, "--gc=false", "--gc=true"),
    ("--gc", True, "--gc 0 out", "--gc 1 out"),
    ("--gc", False, "--gc=YES", "--gc=NO"),
    ("--gc", True, "--no-gc --x", "--gc --x"),
    ("--gc", False, "--no_gc --x", "--no_gc --x"),
    ("--gc", None, "--gc", "--gc"),
    ("--attn", "eager", "--attn sdpa --x", "--attn eager --x"),
    ("--attn", "eager", "--x", "--x --attn eager"),
    ("--workers", 2, "--workers=0", "--workers=2"),
    ("--attn", "true", "--x", "--x --attn true"),
    ("trainer.compile", True, "trainer.compile=False", "trainer.compile=True"),
    ("trainer.compile", True, "", "trainer.compile=true"),
    ("argv:2", "big", "data small", "data big"),
]


@pytest.mark.parametrize(("place", "value", "before", "after"), FLAGS)
def test_a_switch_is_set_in_the_form_that_was_typed(place: str, value: SwitchValue, before: str, after: str) -> None:
    found = command(before, {place: value})
    assert " ".join(found.arguments) == after
    assert found.variables == {}
    assert bool(found.changes) == (before != after)


def test_a_variable_is_set_beside_the_arguments() -> None:
    found = command("--x", {"OMP_NUM_THREADS": 2, "CACHE": False, "OWN": None}, CACHE="True", OWN="1")
    assert found.variables == {"OMP_NUM_THREADS": "2", "CACHE": "False"}
    assert found.changes == [("", "OMP_NUM_THREADS=2"), ("CACHE=True", "CACHE=False")]


def test_a_value_in_a_file_is_set_in_a_copy_and_reads_back_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text("a: {workers: 0}\nkernel: sdpa # why\nfast: False\n")
    values: dict[str, SwitchValue] = {"workers": 4, "kernel": "a: b", "fast": True}
    switches = {f"conf.yaml:{'a.workers' if name == 'workers' else name}": value for name, value in values.items()}
    found = command("--config conf.yaml", switches, tmp_path)
    ((copy, text),) = found.files.items()
    assert found.arguments == ["--config", copy]
    assert yaml.safe_load(text) == {"a": {"workers": 4}, "kernel": "a: b", "fast": True}
    assert "# why" in text


def test_text_in_a_json_file_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "conf.json").write_text('{"kernel": "sdpa"}')
    found = command("conf.json", {"conf.json:kernel": "eager"}, tmp_path)
    assert list(found.files.values()) == ['{"kernel": "eager"}']


def test_switches_and_a_mapped_batch_share_one_copy(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").write_text("batch: 4\nworkers: 0\n")
    entrypoint = parse_entrypoint(["python", "train.py", "conf.yaml"])
    found = trial_command(
        entrypoint,
        tmp_path / "trial/ds.json",
        {MICRO_BATCH: "conf.yaml:batch"},
        {MICRO_BATCH: 8},
        {},
        tmp_path,
        {"conf.yaml:workers": 2},
    )
    assert list(found.files.values()) == ["batch: 8\nworkers: 2\n"]


TYPED: list[tuple[str, list[SwitchValue], str, SwitchValue]] = [
    ("--gc", [True, False], "--lr 1", False),
    ("--gc", [True, False], "--gc", True),
    ("--gc", [True, False], "--gc out", True),
    ("--gc", [True, False], "--gc False", False),
    ("--gc", [True, False], "--gc=True", True),
    ("--gc", [True, False], "--no-gc", False),
    ("--gc", [True, False], "--gc --no-gc", False),
    ("--attn", ["sdpa", "eager"], "", None),
    ("--attn", ["sdpa", "eager"], "--attn eager", "eager"),
    ("--attn", ["sdpa", "eager"], "--attn flash", "flash"),
    ("--workers", [0, 2], "--workers 2", 2),
    ("--lr", [0.001, 0.1], "--lr 1e-3", "1e-3"),
    ("a.b", [True, False], "a.b=False", False),
    ("a.b", [True, False], "", None),
    ("OMP", [1, 2], "", 1),
    ("GONE", [1, 2], "", None),
]


@pytest.mark.parametrize(("place", "values", "arguments", "own"), TYPED)
def test_the_users_value_is_that_of_the_command_as_typed(
    place: str, values: list[SwitchValue], arguments: str, own: SwitchValue
) -> None:
    found = typed_switch(place, values, arguments.split(), {"OMP": "1"}, Path())
    assert (found, type(found)) == (own, type(own))


def test_the_users_value_in_a_file_is_read_without_its_quotes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kernel: 'sdpa'\n")
    assert typed_switch("c.yaml:kernel", ["eager", "sdpa"], ["c.yaml"], os.environ, tmp_path) == "sdpa"
    with pytest.raises(InputError, match=r"c\.yaml has no value other"):
        typed_switch("c.yaml:other", ["eager"], ["c.yaml"], os.environ, tmp_path)


def test_switches_are_a_part_of_a_candidates_settings_that_deepspeed_does_not_get() -> None:
    settings = {"zero_optimization": {"stage": 1}, "program": {"conf.yaml:a.b": 2, "--x.y": True}}
    assert deepspeed_part(settings) == {"zero_optimization": {"stage": 1}}
    assert switches_of(settings) == {"conf.yaml:a.b": 2, "--x.y": True}
    assert switches_of({}) == {}
    assert place_of(path_of("--x.y")) == "--x.y"
    assert [shown_switch("--x", value) for value in (True, False, None, "a")] == [
        "--x",
        "no --x",
        "--x as typed",
        "--x=a",
    ]
