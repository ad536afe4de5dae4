"""The line of the code at which a setting stands."""

from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.code_places import code_place
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


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("train_micro_batch_size_per_gpu", "train.py:6"),
        ("zero_optimization.stage", "train.py:8"),
        ("zero_optimization.overlap_comm", "train.py:12"),
        ("per_device_train_batch_size", "train.py:18"),
        ("fp16.enabled", "settings.py:1"),
        ("zero_optimization.reduce_bucket_size", "train.py:5"),
        ("bf16.enabled", ""),
    ],
)
def test_a_setting_is_found_where_the_code_gives_it_a_value(tmp_path: Path, setting: str, place: str) -> None:
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "settings.py").write_text('CONFIG = {"fp16": {"enabled": True}}\n')
    assert code_place(Entrypoint(script="train.py"), tmp_path, setting) == place


def test_an_argument_that_is_left_out_belongs_to_the_call(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import x\n\nargs = x.SFTConfig(output_dir='out')\n")
    assert code_place(Entrypoint(script="train.py"), tmp_path, "gradient_accumulation_steps") == "train.py:3"


def test_without_a_script_there_is_no_line(tmp_path: Path) -> None:
    assert code_place(Entrypoint(script="gone.py"), tmp_path, "zero_optimization.stage") == ""
