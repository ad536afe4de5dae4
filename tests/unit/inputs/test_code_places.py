"""What an answer changes in the code, where a setting stands."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.inputs.code_places import code_edits
from zerotune.trial_lib.inputs.entrypoint import Entrypoint

CODE = """\
import deepspeed
from settings import CONFIG
from transformers import TrainingArguments

config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 2,
    },
}
config["gradient_accumulation_steps"] = 2
config["zero_optimization"]["overlap_comm"] = True


def main():
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
    )
    arguments.weight_decay = 0.1
"""


def edits(folder: Path, values: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    found = code_edits(Entrypoint(script="train.py"), folder, values)
    lines = [line for change in found.changes for line in change.diff(folder).splitlines()]
    return [line for line in lines if line[:3] not in ("---", "+++")], dict(found.left)


@pytest.mark.parametrize(
    ("setting", "value", "lines"),
    [
        ("train_micro_batch_size_per_gpu", 8, ['-    "train_micro_batch_size_per_gpu": 4,', "@@ -6 +6 @@"]),
        ("zero_optimization.stage", 1, ['+        "stage": 1,', "@@ -8 +8 @@"]),
        ("zero_optimization.overlap_comm", False, ['+config["zero_optimization"]["overlap_comm"] = False']),
        ("per_device_train_batch_size", 8, ["+        per_device_train_batch_size=8,", "@@ -18 +18 @@"]),
        ("fp16.enabled", False, ['+CONFIG = {"fp16": {"enabled": False}}']),
    ],
)
def test_a_setting_changes_where_the_code_gives_it_a_value(
    tmp_path: Path, setting: str, value: Any, lines: list[str]
) -> None:
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "settings.py").write_text('CONFIG = {"fp16": {"enabled": True}}\n')
    shown, left = edits(tmp_path, {setting: value})
    assert set(lines) <= set(shown)
    assert (len(shown), left) == (3, {})


@pytest.mark.parametrize(
    ("setting", "place"), [("zero_optimization.reduce_bucket_size", "train.py:5"), ("bf16.enabled", "")]
)
def test_a_setting_without_a_value_is_left_to_the_user(tmp_path: Path, setting: str, place: str) -> None:
    (tmp_path / "train.py").write_text(CODE)
    assert edits(tmp_path, {setting: 1}) == ([], {setting: place})


def test_values_of_one_line_change_together_and_those_of_two_places_are_left(tmp_path: Path) -> None:
    config = '"""ä"""; config = {"zero_optimization": {"stage": 2, "overlap_comm": True}}\n'
    (tmp_path / "train.py").write_text(f"{config}x(batch_size=4); y(batch_size=4)\n")
    values = {"zero_optimization.stage": 1, "zero_optimization.overlap_comm": False, "batch_size": 8}
    shown, left = edits(tmp_path, values)
    assert shown[-1] == '+"""ä"""; config = {"zero_optimization": {"stage": 1, "overlap_comm": False}}'
    assert left == {"batch_size": "train.py:2"}


def test_a_file_that_the_code_names_changes_where_the_program_does_not_fill_it_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("args = SFTConfig(deepspeed='ds.json', per_device_train_batch_size=4)\n")
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config, indent=2))
    shown, left = edits(tmp_path, {"train_micro_batch_size_per_gpu": 8, "zero_optimization.stage": 1})
    assert shown == ["@@ -4 +4 @@", '-    "stage": 2', '+    "stage": 1']
    assert left == {}


def test_an_argument_that_is_left_out_belongs_to_the_call(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import x\n\nargs = x.SFTConfig(output_dir='out')\n")
    assert edits(tmp_path, {"gradient_accumulation_steps": 2}) == ([], {"gradient_accumulation_steps": "train.py:3"})


def test_without_a_script_there_is_no_line(tmp_path: Path) -> None:
    assert edits(tmp_path, {"zero_optimization.stage": 1}) == ([], {"zero_optimization.stage": ""})
