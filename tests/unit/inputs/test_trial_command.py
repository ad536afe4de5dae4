"""What the ranks of a trial are given of the user's command, and what is read off the command as it was typed."""

import base64
import json
from pathlib import Path

import pytest
import yaml

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.inputs.entrypoint import parse_entrypoint
from zerotune.trial_lib.inputs.places import TrialCommand, batch_places, trial_command
from zerotune.trial_lib.messages.errors import InputError

CONFIG = Path("/trial/ds_config.json")


def command(
    arguments: str, mappings: dict[str, str], values: dict[str, object], folder: Path = Path(), **variables: str
) -> TrialCommand:
    entrypoint = parse_entrypoint(["python", "train.py", *arguments.split()])
    return trial_command(entrypoint, CONFIG, mappings, values, variables, folder)


def test_a_trials_configuration_takes_the_place_of_the_users() -> None:
    entrypoint = parse_entrypoint("python train.py --deepspeed=lr=1/ds.json --x", deepspeed_config="lr=1/ds.json")
    found = trial_command(entrypoint, CONFIG, {}, {}, {}, Path())
    assert found.arguments == [f"--deepspeed={CONFIG}", "--x"]
    assert found.changes == [("lr=1/ds.json", str(CONFIG))]
    assert entrypoint.arguments == ("--deepspeed=lr=1/ds.json", "--x")


def test_a_configuration_that_is_an_argument_itself_keeps_its_form() -> None:
    """GPT-NeoX's `train.py` decodes its own arguments, and would not find a path there."""
    values: dict[str, object] = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    own = base64.urlsafe_b64encode(b'{"train_batch_size": 4}').decode()
    (_, encoded, _) = command(f"--deepspeed_config {own} --x", {}, values).arguments
    assert json.loads(base64.urlsafe_b64decode(encoded)) == values
    found = command('--deepspeed={"train_batch_size":4}', {}, values)
    assert json.loads(found.arguments[0].removeprefix("--deepspeed=")) == values
    # Thousands of letters are no news.
    assert found.changes == [('{"train_batch_size":...', str(CONFIG))]


TYPED = [
    ("--batch", "--batch 4 --x", "--batch 8 --x"),
    ("--batch", "--batch=4 --x", "--batch=8 --x"),
    ("--batch", "--batch", "--batch 8"),
    ("--batch", "--batch --x", "--batch 8 --x"),
    ("--batch", "--batch -1 --x", "--batch 8 --x"),
    ("--batch", "-v train --batch 4 --zero 1", "-v train --batch 8 --zero 1"),
    ("--batch-size", "--batch_size 4", "--batch_size 8"),
    ("--batch", "--batch 4 --batch=4", "--batch 8 --batch=8"),
    ("-b", "-b 4 -x", "-b 8 -x"),
    ("-b", "-b4 -x", "-b8 -x"),
    ("-b", "-b=4 -x", "-b=8 -x"),
    ("-b", "-batch x -b4", "-batch x -b8"),
    ("--trainer.batch", "fit --trainer.batch 4 --x", "fit --trainer.batch 8 --x"),
    ("--trainer.batch", "fit --trainer.batch=4", "fit --trainer.batch=8"),
    ("trainer.batch", "fit --trainer.batch=4", "fit --trainer.batch=8"),
    ("trainer.batch", "trainer.batch=4 ds=zero1", "trainer.batch=8 ds=zero1"),
    ("trainer.batch", "+trainer.batch=4", "+trainer.batch=8"),
    ("+trainer.batch", "++trainer.batch=4", "++trainer.batch=8"),
    (
        "trainer.batch",
        "--cfg-options other.trainer.batch=4 trainer.batch=4",
        "--cfg-options other.trainer.batch=4 trainer.batch=8",
    ),
    ("batch", "batch=4", "batch=8"),
    ("BATCH", "BATCH=4", "BATCH=8"),
    ("SOLVER.IMS", "--num 1 SOLVER.LR 1 SOLVER.IMS 4", "--num 1 SOLVER.LR 1 SOLVER.IMS 8"),
    ("argv:2", "data 4 2", "data 8 2"),
]


@pytest.mark.parametrize(("target", "before", "after"), TYPED)
def test_what_is_typed_is_replaced_once_in_its_own_form_and_its_value_is_the_users(
    target: str, before: str, after: str
) -> None:
    found = command(before, {MICRO_BATCH: target}, {MICRO_BATCH: 8}, BATCH="2")
    assert " ".join(found.arguments) == after
    assert found.variables == {}
    assert all(old and new for old, new in found.changes)
    places = batch_places(before.split(), {"BATCH": "2"}, {MICRO_BATCH: target}, Path())
    assert [place.value for place in places] == ([4] if "4" in before else [])


ADDED = [
    ("--batch", "--batches 4", "--batches 4 --batch 8"),
    ("--batch", "", "--batch 8"),
    ("--batch", "--x=1", "--x=1 --batch=8"),
    ("-b", "--x=1", "--x=1 -b 8"),
    ("--batch", "-v train --zero 1 --lr 1e-3", "-v train --zero 1 --lr 1e-3 --batch 8"),
    ("--batch", "run --accum=4", "run --accum=4 --batch=8"),
    ("--batch", "train --x 1 -- --batch 4", "train --x 1 --batch 8 -- --batch 4"),
    ("--trainer.batch", "fit --config c.yaml", "fit --config c.yaml --trainer.batch 8"),
    ("trainer.batch", "", "trainer.batch=8"),
    ("trainer.batch", "ds=zero1 --config-name train", "ds=zero1 trainer.batch=8 --config-name train"),
    ("+trainer.batch", "--config-name train", "--config-name train +trainer.batch=8"),
    ("++batch", "--multirun ds=zero1", "--multirun ds=zero1 ++batch=8"),
]


@pytest.mark.parametrize(("target", "before", "after"), ADDED)
def test_what_is_not_typed_is_added_where_the_program_takes_it(target: str, before: str, after: str) -> None:
    found = command(before, {MICRO_BATCH: target}, {MICRO_BATCH: 8})
    assert " ".join(found.arguments) == after
    assert found.variables == {}
    assert [old for old, _ in found.changes] == [""]
    assert batch_places(before.split(), {}, {MICRO_BATCH: target}, Path()) == []


def test_a_plain_name_that_no_argument_has_is_a_variable() -> None:
    found = command(
        "batch=4 BATCHES=4", {MICRO_BATCH: "BATCH", ACCUMULATION: "ACC"}, {MICRO_BATCH: 8, ACCUMULATION: 2}, BATCH="4"
    )
    assert found.arguments == ["batch=4", "BATCHES=4"]
    assert found.variables == {"BATCH": "8", "ACC": "2"}
    assert found.changes == [("BATCH=4", "BATCH=8"), ("", "ACC=2")]
    (place,) = batch_places(["batch=2"], {"BATCH": "4"}, {MICRO_BATCH: "BATCH"}, Path())
    assert (place.value, place.shown) == (4, "BATCH=4")


@pytest.mark.parametrize("target", ["--batch", "batch", "trainer.batch", "argv:1", "BATCH"])
@pytest.mark.parametrize("values", [{}, {TRAIN_BATCH: "auto"}])
def test_a_mapped_key_without_a_number_leaves_the_users_words(target: str, values: dict[str, object]) -> None:
    found = command("4 --batch 4 batch=4 trainer.batch=4", {TRAIN_BATCH: target}, values)
    assert found == TrialCommand(["4", "--batch", "4", "batch=4", "trainer.batch=4"], {}, {}, [])


def test_words_by_their_numbers_are_those_that_were_typed() -> None:
    mappings = {MICRO_BATCH: "a.b", ACCUMULATION: "argv:2", TRAIN_BATCH: "argv:4"}
    found = command("x=1 2 -- 3", mappings, {MICRO_BATCH: 8, ACCUMULATION: 4, TRAIN_BATCH: 32})
    assert found.arguments == ["x=1", "a.b=8", "4", "--", "32"]
    with pytest.raises(InputError, match="no word 5 behind the script's name, where 4 stand"):
        command("x=1 2 -- 3", {MICRO_BATCH: "argv:5"}, {MICRO_BATCH: 8})


def test_a_value_that_stays_is_no_change() -> None:
    found = command(
        "--batch 8", {MICRO_BATCH: "--batch", ACCUMULATION: "ACC"}, {MICRO_BATCH: 8, ACCUMULATION: 2}, ACC="2"
    )
    assert (found.arguments, found.variables, found.changes) == (["--batch", "8"], {"ACC": "2"}, [])


YAML = """
defaults: &sizes
  batch: &size 4   # of one device
loaders:
  - {batch: !!int 4, name: "ü"}
trainer: {accumulate: '2'}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text(YAML, encoding="utf-8")
    (tmp_path / "train.json").write_text('{\n\t"trainer":\t{"batch": 4, "text": "a\\tb"}\n}')
    return tmp_path


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("defaults.batch", "&size 4", "&size 8"),
        ("loaders.0.batch", "!!int 4", "!!int 8"),
        ("trainer.accumulate", "'2'", "'8'"),
    ],
)
@pytest.mark.parametrize("typed", ["--config conf/train.yaml", "--config=conf/train.yaml", "cfg=./conf/train.yaml"])
def test_a_trial_has_its_own_copy_of_a_mapped_file_with_nothing_else_changed(
    folder: Path, typed: str, key: str, old: str, new: str
) -> None:
    found = command(f"{typed} --x", {MICRO_BATCH: f"conf/train.yaml:{key}"}, {MICRO_BATCH: 8}, folder)
    copy = "/trial/command_files/0/train.yaml"
    assert " ".join(found.arguments) == f"{typed.replace('./', '').replace('conf/train.yaml', copy)} --x"
    assert found.files == {copy: YAML.replace(old, new, 1)}
    assert yaml.safe_load(found.files[copy])
    assert (folder / "conf" / "train.yaml").read_text(encoding="utf-8") == YAML


def test_two_values_in_one_file_are_set_in_one_copy(folder: Path) -> None:
    mappings = {MICRO_BATCH: "conf/train.yaml:defaults.batch", ACCUMULATION: "conf/train.yaml:trainer.accumulate"}
    found = command("conf/train.yaml", mappings, {MICRO_BATCH: 16, ACCUMULATION: 3}, folder)
    (text,) = found.files.values()
    data = yaml.safe_load(text)
    assert (data["defaults"]["batch"], data["trainer"]["accumulate"]) == (16, "3")


def test_a_file_may_be_named_in_a_folder_that_another_word_names(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "small.yml").write_text("batch: 4\n")
    words, target = ["-d", "conf", "small.yml"], {MICRO_BATCH: "conf/small.yml:batch"}
    (place,) = batch_places(words, {}, target, tmp_path)
    assert place.value == 4
    # A program is given none of it, and its wrapper is.
    given = ["--size", "4", "--settings", "eyJ0" * 200]
    assert batch_places(given, {}, target, tmp_path, wrapper=["python", "deepy.py", *words]) == [place]
    entrypoint = parse_entrypoint(["python", "train.py", *words])
    command = trial_command(entrypoint, tmp_path / "own" / "ds.json", target, {MICRO_BATCH: 16}, {}, tmp_path)
    copy = tmp_path / "own" / "command_files" / "0" / "small.yml"
    assert command.arguments == ["-d", "conf", str(copy)]
    assert command.files == {str(copy): "batch: 16\n"}


def test_a_json_file_may_be_indented_by_tabs(folder: Path) -> None:
    (text,) = command("train.json", {MICRO_BATCH: "train.json:trainer.batch"}, {MICRO_BATCH: 8}, folder).files.values()
    assert json.loads(text) == {"trainer": {"batch": 8, "text": "a\tb"}}
    (place,) = batch_places(["train.json"], {}, {MICRO_BATCH: "train.json:trainer.batch"}, folder)
    assert (place.value, place.shown) == (4, "train.json:trainer.batch=4")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("conf/train.yaml:defaults.size", "conf/train.yaml has no value defaults.size"),
        ("conf/train.yaml:defaults", "conf/train.yaml has no value defaults"),
        ("conf/train.yaml:loaders.1.batch", "has no value loaders.1.batch"),
        ("train.json:trainer.batch", "no argument of the program is train.json"),
        ("gone.yaml:batch", "gone.yaml cannot be read"),
        ("torn.yaml:batch", "torn.yaml cannot be read"),
    ],
)
def test_a_value_that_is_in_no_file_of_the_command_is_refused(folder: Path, target: str, said: str) -> None:
    (folder / "torn.yaml").write_text("{torn")
    with pytest.raises(InputError) as refused:
        batch_places(["conf/train.yaml", "gone.yaml", "torn.yaml"], {}, {MICRO_BATCH: target}, folder)
    assert said in refused.value.what
    assert refused.value.where == target
