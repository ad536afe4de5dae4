"""A DeepSpeed configuration wherever DeepSpeed finds one: in a file, with comments, in base64, as JSON."""

import base64
from pathlib import Path

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import is_programs_own_name, read_deepspeed_json, read_named_config
from zerotune.trial_lib.messages.errors import InputError

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
JSON = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'
WITH_COMMENTS = """\
# of the large model
{
  "train_batch_size": 8,  // samples
  /* shards
     gradients */
  "zero_optimization": {"stage": 2,},
}
"""


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(WITH_COMMENTS)
    assert read_deepspeed_json(path) == CONFIG


def test_a_key_that_stands_twice_is_refused_beside_comments_as_well(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(WITH_COMMENTS.replace("zero_optimization", "train_batch_size"))
    with pytest.raises(InputError, match='the key "train_batch_size" occurs twice'):
        read_deepspeed_json(path)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode], ids=["base64", "urlsafe"])
def test_base64_names_the_configuration_that_it_holds(tmp_path: Path, encode: type[bytes]) -> None:
    assert read_named_config(encode(JSON.encode()).decode(), tmp_path, where="the command") == CONFIG


def test_json_and_a_path_name_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "my ds.json").write_text(JSON)
    for value in (JSON, "my ds.json", str(tmp_path / "my ds.json")):
        assert read_named_config(value, tmp_path, where="the command") == CONFIG


@pytest.mark.parametrize("value", ["none.json", "", "x" * 10_000, "ZHM=", "\0"])
def test_anything_else_is_a_file_that_does_not_exist(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError) as refused:
        read_named_config(value, tmp_path, where="the command")
    assert refused.value.where == "the command" or value == ""


@pytest.mark.parametrize("value", ["zero2", "default", "zero3_offload", "zero2-bf16"])
def test_one_word_that_is_no_file_is_a_name_of_the_programs_own(tmp_path: Path, value: str) -> None:
    assert is_programs_own_name(value, tmp_path)
    (tmp_path / value).write_text("{}")
    assert not is_programs_own_name(value, tmp_path)


@pytest.mark.parametrize(
    "value", ["zero2.json", "conf/zero2", "./zero2", "", '{"train_batch_size": 4}', "e30=", "x" * 10_000]
)
def test_a_mistyped_path_is_no_name(tmp_path: Path, value: str) -> None:
    assert not is_programs_own_name(value, tmp_path)
    assert not is_programs_own_name(value, tmp_path, "examples/train.py")


def test_a_file_beside_the_script_is_the_programs_to_find(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "zero2.json").write_text(JSON)
    assert is_programs_own_name("zero2.json", tmp_path, "examples/train.py")
    (tmp_path / "zero2.json").write_text(JSON)
    assert not is_programs_own_name("zero2.json", tmp_path, "examples/train.py")
