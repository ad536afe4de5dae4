import argparse
import base64
import json
import re
import sys
from types import SimpleNamespace

import pytest

from zerotune.trial_lib.inputs.places import MAPPING_TARGET
from zerotune.trial_lib.rank import batch_source
from zerotune.trial_lib.rank.batch_source import BatchSource, composed_by_hydra, stage_repeated


def reason(folder, arguments=(), environment=None, configuration=None):
    return BatchSource(list(arguments), environment or {}, folder).ignored_batch_reason(1, 8, configuration)


def test_both_sizes_are_named(tmp_path):
    assert "batches of 8 to an engine that was set to a micro-batch of 1" in reason(tmp_path)


@pytest.mark.parametrize(
    "flag", ["--batch-size", "--batch_size", "-b", "--bs", "--train-bsz", "--mbs", "--perDeviceBatch"]
)
@pytest.mark.parametrize("joined", [True, False])
def test_a_flag_with_the_size_that_came_is_the_one_to_map(tmp_path, flag, joined):
    arguments = [f"{flag}=8"] if joined else [flag, "8"]
    written = reason(tmp_path, ["--epochs", "3", *arguments, "--name", "x"])
    assert f"--map train_micro_batch_size_per_gpu={flag} " in written
    assert (f"{' '.join(arguments)}, which may be its batch size" in written) == (flag == "-b")


def test_a_flag_named_for_the_batch_comes_before_one_that_has_the_same_value(tmp_path):
    assert "={flag} ".format(flag="--batch") in reason(tmp_path, ["--layers", "8", "--batch", "8"])


def test_a_flag_comes_before_a_variable_and_that_before_a_file(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8}))
    variables = {"BATCH_SIZE": "8", "OMP_NUM_THREADS": "8"}
    assert "=--batch-size " in reason(tmp_path, ["--batch-size", "8"], variables)
    assert "Its environment has BATCH_SIZE=8" in reason(tmp_path, [], variables)
    assert "ds.json has train_micro_batch_size_per_gpu 8" in reason(tmp_path, [], {"OMP_NUM_THREADS": "8"})


def test_what_is_no_configuration_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_text("{torn")
    (tmp_path / "b.json").write_text("[8]")
    (tmp_path / "c.json").mkdir()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 8}))
    assert "deep/ds.json has" in reason(tmp_path)


def test_a_size_in_the_codes_own_configuration_is_told(tmp_path):
    written = reason(tmp_path, ["--layers", "8"], configuration={"train_micro_batch_size_per_gpu": 8})
    assert "The configuration in the code has" in written


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("trainer.micro_batch=8", "trainer.micro_batch"),
        ("++data.bs=8", "data.bs"),
        ("batch=8", "batch"),
        ("--trainer.batch=8", "--trainer.batch"),
        ("--trainer.batch 8", "--trainer.batch"),
        ("SOLVER.IMS_PER_BATCH 8", "SOLVER.IMS_PER_BATCH"),
        ("train 8", "argv:5"),
        ("conf/train.yaml", "conf/train.yaml:data.train_batch"),
        ("config=conf/train.yaml", "conf/train.yaml:data.train_batch"),
    ],
)
def test_every_place_of_a_command_is_named_as_it_is_mapped(tmp_path, word, target):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("data: {layers: 8, train_batch: 8}")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {}}))
    written = reason(tmp_path, ["--deepspeed", "ds.json", "x=9", *word.split()])
    assert f"--map train_micro_batch_size_per_gpu={target} " in written
    assert re.fullmatch(MAPPING_TARGET, target)


def test_a_program_of_hydras_is_told_of_its_overrides(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra", sys)
    assert "--map train_micro_batch_size_per_gpu=trainer.batch_size " in reason(tmp_path, ["--config-name", "train"])


@pytest.fixture
def composed(tmp_path, monkeypatch):
    """A file in which Hydra has written what it has composed."""
    own = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path)), output_subdir=".hydra")
    config = SimpleNamespace(HydraConfig=SimpleNamespace(get=lambda: own))
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", config)
    (tmp_path / ".hydra").mkdir()
    return tmp_path / ".hydra" / "config.yaml"


@pytest.mark.parametrize(("written", "target"), [("loop: {batch: 8}", "loop.batch"), ("batch: 8", "++batch")])
def test_a_size_that_hydra_has_composed_is_an_override(tmp_path, composed, written, target):
    composed.write_text(f"seed: 8\n{written}\n")
    assert f"--map train_micro_batch_size_per_gpu={target} " in reason(tmp_path, ["engine=zero1"])


def test_a_size_that_deepspeeds_section_takes_from_elsewhere_in_hydras_configuration_is_set_there(tmp_path, composed):
    engine = "engine: {train_micro_batch_size_per_gpu: 8, zero_optimization: {stage: 2}}"
    composed.write_text(f"{engine}\ndata: {{samples: 8, batch_per_device: 8}}\n")
    written = reason(tmp_path, ["data=short"], {}, {"train_micro_batch_size_per_gpu": 8})
    assert "--map train_micro_batch_size_per_gpu=data.batch_per_device " in written


def test_of_hydras_configuration_texts_stay_where_they_are(composed):
    engine = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    kept = {"loop": {"batch": 8, "rate": 0.1, "steps": "${steps}"}, "engine": engine}
    composed.write_text(json.dumps({**kept, "token": "hf_x", "hosts": ["a"]}))
    assert composed_by_hydra() == kept


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("--seed 1 --zero-stage 1", "--zero-stage"),
        ("--zero_optimization_stage=1", "--zero_optimization_stage"),
        ("engine.zero_stage=1", "engine.zero_stage"),
        ("--stage 1", None),
        ("--zero-stage 2", None),
    ],
)
def test_an_option_that_repeats_the_stage_is_known_by_its_name_and_value(words, target):
    assert stage_repeated(words.split(), 1) == target


def test_where_nothing_fits_all_ways_are_named(tmp_path, monkeypatch):
    # A plugin of pytest's imports it where it is installed.
    monkeypatch.delitem(sys.modules, "hydra", raising=False)
    written = reason(tmp_path, ["--batch-size", "9"], {"BATCH": "9"}, {"train_micro_batch_size_per_gpu": "auto"})
    for way in ("engine.train_micro_batch_size_per_gpu()", "JSON file", "--map", "arg_mappings", "use more data"):
        assert way in written


@pytest.fixture
def parser(monkeypatch):
    """A parser whose options the program has read, none of them typed."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    monkeypatch.setattr(batch_source, "_parsed", [])
    batch_source.note_parsers()
    return argparse.ArgumentParser()


def test_an_option_that_nobody_has_typed_is_the_one_to_map(tmp_path, parser):
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--per_device_batch", type=int, default=8)
    parser.parse_args([])
    configuration = {"train_micro_batch_size_per_gpu": 8}
    written = reason(tmp_path, configuration=configuration)
    assert "Its option --per_device_batch is 8. " in written
    assert "--map train_micro_batch_size_per_gpu=--per_device_batch " in written


def test_an_option_that_holds_the_batch_of_all_ranks_is_mapped_to_that(tmp_path, parser):
    parser.add_argument("-b", "--batch-size", type=int, default=256)
    parser.parse_args(["-b", "16"])
    source = BatchSource(["-b", "16"], {}, tmp_path, replicas=2)
    assert "--map train_batch_size=-b " in source.ignored_batch_reason(1, 8, None)


def test_a_parameter_of_a_function_that_fire_runs_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fire", sys)

    def train(layers: int = 8, batch_size: int = 8) -> str:
        return reason(tmp_path)

    assert "Its option --batch_size is 8. " in train()
    assert "Its option" not in train(batch_size=4)


def test_steps_that_do_not_follow_the_accumulation_are_told_with_the_ways_that_do(tmp_path):
    said = BatchSource([], {}, tmp_path).ignored_accumulation_reason(4, 1)
    assert said.startswith("The script took an optimizer step after 1 micro-batch, but its engine was set to an acc")
    assert "--map gradient_accumulation_steps=--accumulation" in said


def test_a_batch_that_is_divided_among_the_ranks_is_told_without_a_mapping_that_contradicts_the_engine(
    tmp_path,
):
    words = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
    said = BatchSource(words, {}, tmp_path, replicas=2).ignored_batch_reason(8, 4, None, accumulation=2)
    assert said == (
        "The script fed batches of 4 to an engine that was set to a micro-batch of 8. It divides its "
        "--per_device_train_batch_size 8 among its 2 ranks, as Accelerate does with split_batches, but DeepSpeed takes "
        "that for the size of each rank. Turn the dividing off, and type your --per_device_train_batch_size divided by "
        "2. Then the same rows arrive, and all sizes agree."
    )
    # A program that stays at its own size divides nothing.
    ignored = BatchSource(["--batch-size", "4"], {}, tmp_path, replicas=2).ignored_batch_reason(8, 4, None)
    assert "--map train_micro_batch_size_per_gpu=--batch-size" in ignored


@pytest.mark.parametrize("form", ["{}", "base64"])
@pytest.mark.parametrize("joined", [" ", "="])
def test_a_size_in_an_object_of_another_option_is_named_and_no_place_to_map(tmp_path, form, joined):
    def written(config):
        text = json.dumps(config)
        return text if form == "{}" else base64.urlsafe_b64encode(text.encode()).decode()

    of_deepspeed = written({"train_micro_batch_size_per_gpu": 1, "train_batch_size": 8})
    own = written({"layers": 8, "train_micro_batch_size_per_gpu": 8})
    words = ["--deepspeed_config", of_deepspeed, *(["--own", own] if joined == " " else [f"--own={own}"])]
    said = reason(tmp_path, words)
    kind = "JSON" if form == "{}" else "base64"
    assert f"It has train_micro_batch_size_per_gpu 8 in the {kind} of --own, which no trial changes." in said
    assert "engine.train_micro_batch_size_per_gpu()" in said
    assert "--map" not in said
