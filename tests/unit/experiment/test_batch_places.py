"""A batch size that is set in two places: with one value it is fine, with two both places are named."""

from pathlib import Path

import pytest

from trial_lib.experiment.batch_places import batch_places, refuse_two_values
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.overrides import ACCUMULATION, MICRO_BATCH
from trial_lib.experiment.yaml_file import read_experiment


def check(config: dict[str, object], command: str, **mappings: str) -> None:
    words = command.split()
    environment = dict(word.split("=") for word in words if word.isupper() and "=" in word)
    refuse_two_values(config, "ds.json", batch_places(words, environment, mappings, Path()))


@pytest.mark.parametrize(
    ("config", "command", "mappings", "places"),
    [
        (
            {ACCUMULATION: 4},
            "--gradient_accumulation_steps 2",
            {},
            ('"gradient_accumulation_steps": 4 in ds.json', "--gradient_accumulation_steps 2 in the command"),
        ),
        ({ACCUMULATION: 4}, "--gradient-accumulation-steps=2", {}, ("--gradient-accumulation-steps=2 in the command",)),
        ({ACCUMULATION: 4}, "--acc 2", {ACCUMULATION: "--acc"}, ("--acc 2 in the command",)),
        ({ACCUMULATION: 4}, "ACC=2", {ACCUMULATION: "ACC"}, ("ACC=2 in the command",)),
        ({MICRO_BATCH: 4}, "--per_device_train_batch_size 2", {}, (f'"{MICRO_BATCH}": 4 in ds.json',)),
        ({MICRO_BATCH: 4}, "-b2", {MICRO_BATCH: "-b"}, ("-b2 in the command",)),
        ({MICRO_BATCH: 4}, "--b 4 --b 2", {MICRO_BATCH: "--b"}, ("--b 2 in the command",)),
        (
            {},
            "--gradient_accumulation_steps 2 --acc 4",
            {ACCUMULATION: "--acc"},
            ("--acc 4 in the command", "--gradient_accumulation_steps 2 in the command"),
        ),
    ],
)
def test_two_values_are_refused_and_both_places_named(
    config: dict[str, object], command: str, mappings: dict[str, str], places: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as refused:
        check(config, command, **mappings)
    for place in places:
        assert place in refused.value.what


@pytest.mark.parametrize(
    ("config", "command", "mappings"),
    [
        ({ACCUMULATION: 2}, "--gradient_accumulation_steps 2", {}),
        ({ACCUMULATION: "auto"}, "--gradient_accumulation_steps 2", {}),
        ({}, "--gradient_accumulation_steps 2", {}),
        ({ACCUMULATION: 4}, "", {ACCUMULATION: "--acc"}),
        ({ACCUMULATION: 4}, "--acc fast", {ACCUMULATION: "--acc"}),
        ({ACCUMULATION: 4}, "--acc 2", {}),
        ({ACCUMULATION: 4}, "-- --gradient_accumulation_steps 2", {}),
        ({MICRO_BATCH: 4}, "--b 2 --b 4", {MICRO_BATCH: "--b"}),
    ],
)
def test_one_value_auto_or_no_number_is_fine(config: dict[str, object], command: str, mappings: dict[str, str]) -> None:
    check(config, command, **mappings)


def test_a_yaml_with_two_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}')
    (tmp_path / "experiment.yaml").write_text(
        "entrypoint: python3 train.py --deepspeed ds.json --gradient_accumulation_steps 2\n"
        "hyperparameters: {deepspeed_config: ds.json}\n"
    )
    with pytest.raises(InputError, match=r"4 in ds\.json, and --gradient_accumulation_steps 2 in the command"):
        read_experiment(tmp_path / "experiment.yaml", tmp_path)
