"""An edit of the user's file changes one value, and no other character."""

import difflib
import json

import pytest
import yaml

from zerotune.trial_lib.inputs.documents import REMOVED, edited, read_document, text_at
from zerotune.trial_lib.messages.errors import InputError

COMMENTED = """\
# Fine-tuning, by hand
model: tiny  # small
train:
  batch: 4   # per device
  stages: [0, 1,  2]

  'quoted': "8"
  single: '2'
name: größe ☃
"""


def changed_lines(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0)
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


@pytest.mark.parametrize(
    ("key", "value", "lines"),
    [
        (("train", "batch"), 16, ["-  batch: 4   # per device\n", "+  batch: 16   # per device\n"]),
        (("train", "stages", "1"), 3, ["-  stages: [0, 1,  2]\n", "+  stages: [0, 3,  2]\n"]),
        (("train", "quoted"), 16, ["-  'quoted': \"8\"\n", "+  'quoted': \"16\"\n"]),
        (("train", "single"), 16, ["-  single: '2'\n", "+  single: '16'\n"]),
        (
            ("model",),
            "a: b",
            ["-model: tiny  # small\n", '+model: "a: b"  # small\n'],
        ),
        (("train", "accumulation"), 2, ["+  accumulation: 2\n"]),
        (("accumulation",), 2, ["+accumulation: 2\n"]),
        (("zero", "stage"), 2, ['+zero: {"stage": 2}\n']),
        (("train", "batch"), REMOVED, ["-  batch: 4   # per device\n"]),
        (("train", "nothing", "here"), REMOVED, []),
        (("name",), "größer ☃", ["-name: größe ☃\n", "+name: größer ☃\n"]),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_yaml_file_keeps_all_other_characters(key: tuple, value: object, lines: list[str], line_end: str) -> None:
    before = COMMENTED.replace("\n", line_end)
    after = edited(before, "conf.yaml", {key: value})
    assert changed_lines(before, after) == [line.replace("\n", line_end) for line in lines]


def test_several_values_change_at_once() -> None:
    after = edited("a: {x: 1, y: 2}\nb: 3", "conf.yml", {("a", "x"): 4, ("b",): 5, ("a", "y"): REMOVED, ("a", "z"): 6})
    assert after == "a: {x: 4, z: 6}\nb: 5"


def test_an_empty_value_is_filled() -> None:
    assert edited("deepspeed:\nlr: 1\n", "conf.yaml", {("deepspeed",): "ds.json"}) == "deepspeed: ds.json\nlr: 1\n"
    assert edited("zero:\nlr: 1\n", "c.yaml", {("zero", "stage"): 2}) == 'zero: {"stage": 2}\nlr: 1\n'


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [("ds.json", '{"size": "auto"}', '{"size": 5000}'), ("c.yaml", "size: auto\n", "size: 5000\n")],
)
def test_a_number_in_the_place_of_auto_is_no_text(path: str, before: str, after: str) -> None:
    assert edited(before, path, {("size",): 5000}) == after


def test_json_that_is_no_yaml_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="size cannot be changed"):
        edited(json.dumps({"k" * 2000: 1, "size": 2}), "ds.json", {("size",): 5000})


def test_an_alias_is_replaced_where_it_stands() -> None:
    before = "base: &size 4\ntrain: *size  # of a device\neval: *size\n"
    after = edited(before, "conf.yaml", {("train",): 16})
    assert after == "base: &size 4\ntrain: 16  # of a device\neval: *size\n"


def test_a_value_that_others_share_stays() -> None:
    with pytest.raises(InputError, match="base cannot be changed without another value"):
        edited("base: &size 4\ntrain: *size\n", "conf.yaml", {("base",): 16})
    assert edited("base: &size 4\ntrain: *size\n", "c.yaml", {("base",): 16}, shared=True).startswith(
        "base: &size 16\n"
    )


def test_a_key_of_a_merged_mapping_is_written_beside_the_merge() -> None:
    before = "defaults: &d\n  batch: 4\ntrain:\n  <<: *d\n  lr: 1\neval:\n  <<: *d\n"
    after = edited(before, "conf.yaml", {("train", "batch"): 16})
    assert after == before.replace("  lr: 1\n", "  lr: 1\n  batch: 16\n")
    assert yaml.safe_load(after)["eval"] == {"batch": 4}


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_a_json_file_keeps_its_layout(indent: int | str | None) -> None:
    config = {"train_batch_size": "auto", "zero_optimization": {"stage": 2, "overlap_comm": False}, "empty": {}}
    before = json.dumps(config, indent=indent)
    changes = {
        ("zero_optimization", "stage"): 3,
        ("zero_optimization", "reduce_bucket_size"): 1000,
        ("zero_optimization", "overlap_comm"): REMOVED,
        ("empty", "device"): "cpu",
    }
    wanted = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
        "empty": {"device": "cpu"},
    }
    after = edited(before, "ds.json", changes)
    assert json.loads(after) == wanted
    assert len(after.splitlines()) == len(before.splitlines())
    if indent is None or indent == 2:
        assert after.replace('{"device": "cpu"}', "{}") == json.dumps({**wanted, "empty": {}}, indent=indent)


def test_a_toml_file_keeps_its_comments() -> None:
    before = '# mine\n[train]\nbatch = 4 # per device\nname = "ü"\n\n[zero]\nstage = 1\n'
    changes = {("train", "batch"): 8, ("train", "accumulation"): 2, ("zero", "stage"): REMOVED}
    after = edited(before, "conf.toml", changes)
    assert "batch = 8 # per device\n" in after
    assert after.startswith("# mine\n[train]\n")
    wanted = {"train": {"batch": 8, "name": "ü", "accumulation": 2}, "zero": {}}
    assert read_document(after, "conf.toml") == wanted


def test_the_text_of_a_value_has_its_quotes() -> None:
    assert text_at(COMMENTED, "conf.yaml", ("train", "quoted")) == '"8"'
    assert text_at(COMMENTED, "conf.yaml", ("train", "stages")) is None
    assert text_at("a: &x 4\n", "conf.yaml", ("a",)) == "4"
    assert text_at("a = 4\n", "conf.toml", ("a",)) == "4"
