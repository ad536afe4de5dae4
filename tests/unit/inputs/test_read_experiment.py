import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerotune.trial_lib.deepspeed_config.overrides import read_deepspeed_json
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.errors import InputError

MINIMAL = """\
entrypoint: python3 train.py
hyperparameters:
  deepspeed_config: ds_config.json
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "train.py").touch()
    (folder / "model_def.py").write_text("class MyTrial:\n    pass\n")
    (folder / "ds_config.json").write_text('{"train_batch_size": 16, "zero_optimization": {"stage": 1}}')
    return folder


def read(model_dir: Path, text: str | bytes) -> Experiment:
    path = model_dir.parent / "experiment.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_experiment(path, model_dir)


def refusal(model_dir: Path, text: str | bytes) -> str:
    """Returns the whole message without the folder's name."""
    with pytest.raises(InputError) as refused:
        read(model_dir, text)
    return str(refused.value).replace(f"{model_dir.parent}/", "")


def test_a_minimal_experiment_is_read(model_dir: Path) -> None:
    experiment = read(model_dir, MINIMAL)
    assert experiment.name == "model"
    assert experiment.model_dir.is_absolute()
    assert experiment.ds_config == {"train_batch_size": 16, "zero_optimization": {"stage": 1}}
    assert experiment.entrypoint.script == "train.py"
    assert experiment.notes == ()


def test_a_file_written_for_determined_is_read_unchanged(model_dir: Path) -> None:
    experiment = read(
        model_dir,
        """
name: gpt2
description: a language model
project: nlp
workspace: research
entrypoint:
  - python3
  - -m
  - determined.launch.deepspeed
  - python3
  - train.py
  - --deepspeed
  - ds_config.json
hyperparameters:
  deepspeed_config: ds_config.json
  lr: 1e-4
  overwrite_deepspeed_args:
    zero_optimization: {stage: 2}
resources: {slots_per_trial: 2, shm_size: 1000}
searcher: {name: single, metric: loss, smaller_is_better: true, max_length: {batches: 100}}
max_restarts: 0
environment:
  environment_variables: [OMP_NUM_THREADS=1, "GREETING=a=b"]
min_validation_period: {epochs: 1}
min_checkpoint_period: 50
data: {path: /data}
labels: [small]
""",
    )
    config = experiment.config
    assert experiment.ds_config["zero_optimization"] == {"stage": 2}
    assert experiment.environment_variables == {"OMP_NUM_THREADS": "1", "GREETING": "a=b"}
    assert config.hyperparameters.as_dict()["lr"] == 1e-4
    assert config.min_checkpoint_period is not None
    assert config.min_checkpoint_period.batches == 50
    assert experiment.notes == (
        "project, resources.shm_size, workspace have no effect here.",
        "the launcher determined.launch is left out: ZeroTune starts the ranks itself.",
    )


def test_a_configuration_may_stand_in_the_yaml_itself(model_dir: Path) -> None:
    text = "entrypoint: python3 train.py\nhyperparameters: {deepspeed_config: {train_batch_size: 8}}"
    assert read(model_dir, text).ds_config == {"train_batch_size": 8}


def test_a_configuration_may_stand_among_the_hyperparameters(model_dir: Path) -> None:
    text = "entrypoint: python3 train.py\nhyperparameters: {train_batch_size: 8, lr: 1, zero_optimization: {stage: 1}}"
    assert read(model_dir, text).ds_config == {"train_batch_size": 8, "zero_optimization": {"stage": 1}}


def test_a_script_may_have_its_configuration_in_its_code_or_in_its_command(model_dir: Path) -> None:
    assert read(model_dir, "entrypoint: python3 train.py\nhyperparameters: {lr: 1}").ds_config == {}
    named = "entrypoint: python3 train.py --deepspeed ds_config.json"
    assert read(model_dir, named).ds_config == {"train_batch_size": 16, "zero_optimization": {"stage": 1}}


def test_a_script_may_have_a_hyperparameter_of_its_own_with_such_a_name(model_dir: Path) -> None:
    text = "entrypoint: python3 train.py\nhyperparameters: {ds_config: ds_config.json}"
    assert read(model_dir, text).config.hyperparameters.as_dict() == {"ds_config": "ds_config.json"}
    named = "entrypoint: python3 train.py --deepspeed ds_config.json\nhyperparameters: {ds_config: {a: 1}}"
    assert read(model_dir, named).ds_config


def test_a_training_may_do_without_a_configuration(model_dir: Path) -> None:
    path = model_dir.parent / "experiment.yaml"
    path.write_text("entrypoint: python3 train.py\nhyperparameters: {lr: 1}")
    assert read_experiment(path, model_dir, needs_ds_config=False).ds_config == {}


def test_a_trial_class_is_found_without_importing_its_module(model_dir: Path) -> None:
    experiment = read(model_dir, MINIMAL.replace("python3 train.py", "model_def:MyTrial"))
    assert experiment.entrypoint.trial_class == "model_def:MyTrial"
    (model_dir / "model_def.py").write_text("from elsewhere import *")
    assert read(model_dir, MINIMAL.replace("python3 train.py", "model_def:Any")).entrypoint.trial_class


def test_a_trial_class_may_be_installed_or_another_interpreters(model_dir: Path) -> None:
    for entrypoint in (
        "hypothesis.extra:Any",
        f"{sys.executable} -m zerotune.trial_lib.training --trial elsewhere:Any",
    ):
        assert read(model_dir, MINIMAL.replace("python3 train.py", entrypoint)).entrypoint.trial_class


def test_a_trial_class_may_stand_in_what_is_included(model_dir: Path) -> None:
    path, package = model_dir.parent / "experiment.yaml", model_dir.parent / "shared" / "trials"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class MyTrial: ...")
    path.write_text(MINIMAL.replace("python3 train.py", "trials:MyTrial"))
    assert read_experiment(path, model_dir, include=(package,)).entrypoint.trial_class == "trials:MyTrial"
    with pytest.raises(InputError, match="neither in the model directory"):
        read_experiment(path, model_dir)
    path.write_text(MINIMAL.replace("python3 train.py", "trials:MyTrail"))
    with pytest.raises(InputError, match="Did you mean trials:MyTrial"):
        read_experiment(path, model_dir, include=(package,))


def test_a_trial_class_in_a_module_that_is_no_python_is_told_with_its_line(model_dir: Path) -> None:
    (model_dir / "model_def.py").write_text("x = 1\nclass MyTrial(:\n")
    assert "model_def.py:2: this is not Python" in refusal(
        model_dir, MINIMAL.replace("python3 train.py", "model_def:MyTrial")
    )


def test_an_assignment_in_the_entrypoint_wins_over_the_environment(model_dir: Path) -> None:
    text = MINIMAL.replace("python3", "A=2 python3") + "environment: {environment_variables: {A: 1, B: 3}}"
    assert read(model_dir, text).environment_variables == {"A": "2", "B": "3"}


@pytest.mark.parametrize(
    ("size", "in_bytes"), [("2 GiB", 2**31), ("500MB", 500_000_000), ("1.5 MiB", 1_572_864), ("4096", 4096)]
)
def test_memory_sizes_are_bytes(model_dir: Path, size: str, in_bytes: int) -> None:
    experiment = read(model_dir, f"{MINIMAL}resources: {{memory_per_slot: {size}}}")
    assert experiment.config.resources.memory_per_slot == in_bytes


REFUSALS = {
    "an unknown key names the nearest": (
        MINIMAL + "resuorces: {}",
        'experiment.yaml:4:1: unknown key "resuorces". Did you mean "resources"?',
    ),
    "a key in the wrong place says where it belongs": (
        MINIMAL + "slots_per_trial: 2",
        'experiment.yaml:4:1: unknown key "slots_per_trial". It belongs under "resources".',
    ),
    "a key that belongs at the top says so": (
        MINIMAL + "resources:\n  labels: [a]",
        'experiment.yaml:5:3: unknown key "resources.labels". It belongs at the top level.',
    ),
    "a key like no other lists the known ones": (
        MINIMAL + "resources: {zzz: 1}",
        "Known here: slots_per_trial, memory_per_slot",
    ),
    "a wrong type says what stands there": (
        MINIMAL + "resources:\n  slots_per_trial: four",
        'experiment.yaml:5:20: resources.slots_per_trial: expected a whole number, found the text "four".',
    ),
    "a number where text belongs asks for quotes": (
        MINIMAL + "name: 3",
        "experiment.yaml:4:7: name: expected text, found the number 3. Put it in quotes.",
    ),
    "an empty value is nothing": (
        MINIMAL + "arg_mappings: {train_batch_size:}",
        "arg_mappings.train_batch_size: expected text, found nothing.",
    ),
    "an empty value leaves a key out": ("entrypoint:", '"entrypoint" is missing.'),
    "zero slots are too few": (
        MINIMAL + "resources: {slots_per_trial: 0}",
        "resources.slots_per_trial: expected more than 0, found the number 0.",
    ),
    "a size needs a unit that exists": (
        MINIMAL + "resources: {memory_per_slot: 2 GX}",
        "expected a size such as 2 GiB",
    ),
    "only a single searcher": (MINIMAL + "searcher: {name: asha}", "searcher.name: expected 'single'"),
    "a length has one unit": (
        MINIMAL + "searcher: {max_length: {batches: 1, epochs: 2}}",
        "searcher.max_length: expected one of batches, epochs and records.",
    ),
    "a length is a number": (MINIMAL + "min_validation_period: often", "expected a number of batches, or one of"),
    "a training of no length": (MINIMAL + "searcher: {max_length: 0}", "expected a length above 0."),
    "a variable without a value": (
        MINIMAL + "environment: {environment_variables: [A]}",
        "environment.environment_variables: expected NAME=value, found 'A'.",
    ),
    "an unknown mapping": (MINIMAL + "arg_mappings: {lr: --lr}", "experiment.yaml:4:16: arg_mappings.lr: expected"),
    "a mapping to neither flag nor variable": (
        MINIMAL + "arg_mappings: {train_batch_size: batch size}",
        'expected a flag such as --batch-size or the name of an environment variable, found the text "batch size".',
    ),
    "a flag with two meanings": (
        MINIMAL + "arg_mappings: {train_batch_size: --b, gradient_accumulation_steps: --b}",
        "arg_mappings gives --b two meanings.",
    ),
    "a date is no value of a configuration": (
        MINIMAL + "  since: 2024-01-01",
        "experiment.yaml:4:10: hyperparameters.since: expected text, a number, true, false, a list or a mapping, "
        "found 2024-01-01 (a date).",
    ),
    "a key occurs twice": (
        MINIMAL + "name: a\nname: b",
        'experiment.yaml:5:1: the key "name" occurs twice, first in line 4.',
    ),
    "a nested key occurs twice": (MINIMAL + "  lr: 1\n  lr: 2", 'experiment.yaml:5:3: the key "lr" occurs twice'),
    "a value that holds itself": ("a: &a [*a]\n" + MINIMAL, 'unknown key "a".'),
    "a hyperparameter that holds itself": (MINIMAL + "  x: &x {y: *x}", "expected a value that does not hold itself"),
    "no YAML": ("a: [", "experiment.yaml:1:5: not valid YAML:"),
    "no date": (MINIMAL + "name: 2024-13-45", "not valid YAML: this is not a valid timestamp (month must be in 1..12)"),
    "a tag that would run code": ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "a list": ("- a", "experiment.yaml:1:1: an experiment is a mapping, this is a list."),
    "a set": ("!!set\na: 1", "experiment.yaml:1:1: an experiment is a mapping, this is {'a'} (a set)."),
    "an empty file": ("", "experiment.yaml: the file is empty."),
    "only a comment": ("# nothing", "experiment.yaml: the file is empty."),
    "not UTF-8": (b"a: \xff", "experiment.yaml: the file is not UTF-8 (byte 3)."),
    "a control character": ("a: b\nc: \x01", "experiment.yaml:2:4: the character U+0001 is not allowed in YAML."),
    "a key that is no text": (MINIMAL + "  1: a", "experiment.yaml:4:3: a key is text, this one 1 is of type int."),
    "a key that is a list": ("? [a]\n: b", "experiment.yaml:1:3: a key is text, this one is of type seq."),
    "a character that no file name can hold": (MINIMAL + 'name: "a\\0b"', "this is not a valid str (it holds a NUL)"),
    "half a character": (MINIMAL + 'name: "\\ud800"', "experiment.yaml:4:7: not valid YAML: this is not a valid str"),
    "a name too long for a file": (MINIMAL.replace("train", "x" * 300), "is not in the model directory"),
    "deep nesting": ("a: " + "[" * 5000, "experiment.yaml: the YAML is nested too deeply."),
    "no entrypoint": ("name: a", 'experiment.yaml:1:1: "entrypoint" is missing.'),
    "no configuration for a trial class": (
        "entrypoint: model_def:MyTrial\nhyperparameters: {lr: 1}",
        "experiment.yaml:2:1: the experiment names no DeepSpeed configuration, but a search starts from one. "
        "Add `deepspeed_config: ds_config.json` under `hyperparameters`",
    ),
    "a misspelt configuration": (
        "entrypoint: python3 train.py\nhyperparameters: {deepspeed_confg: a}",
        'Did you mean "deepspeed_config" by "deepspeed_confg"?',
    ),
    "a file of GPT-NeoX": (
        '"num-layers": 12\n"train-micro-batch-size-per-gpu": 4\n"zero_optimization": {stage: 1}',
        "experiment.yaml:2:1: this is a file of your program's own, with DeepSpeed's settings in it "
        "(train-micro-batch-size-per-gpu, zero_optimization), and no experiment. Put `zerotune tune --` before",
    ),
    "a configuration that is not there": (
        MINIMAL.replace("ds_config.json", "no.json"),
        "model/no.json: the DeepSpeed configuration does not exist. Name an existing JSON file, relative to the model "
        "directory. It is named at experiment.yaml:3:21.",
    ),
    "a script that is not there": (
        MINIMAL.replace("train.py", "tarin.py"),
        "experiment.yaml:1:13: the script tarin.py is not in the model directory",
    ),
    "a module that is not there": (
        MINIMAL.replace("train.py", "-m no_such.module"),
        "experiment.yaml:1:13: the module no_such.module is neither in the model directory",
    ),
    "a trial class whose module is not there": (
        MINIMAL.replace("python3 train.py", "no_such:Trial"),
        "experiment.yaml:1:13: the module no_such of the trial class no_such:Trial is neither in the model directory",
    ),
    "a trial class that its module does not have": (
        MINIMAL.replace("python3 train.py", "model_def:MyTrail"),
        "model_def.py has no MyTrail. Did you mean model_def:MyTrial?",
    ),
    "an interpreter that is not there": (
        MINIMAL.replace("python3", "./env/bin/python"),
        "experiment.yaml:1:13: the interpreter ./env/bin/python does not exist.",
    ),
    "another configuration in the entrypoint": (
        MINIMAL.replace("train.py", "train.py --deepspeed=other.json"),
        "experiment.yaml:1:13: the entrypoint names the DeepSpeed configuration other.json, and "
        "hyperparameters.deepspeed_config names ds_config.json. Name the same file in both places.",
    ),
    "a configuration in the entrypoint and another in the YAML": (
        "entrypoint: python3 train.py --deepspeed_config ds_config.json\n"
        "hyperparameters: {deepspeed_config: {train_batch_size: 8}}",
        "Write `deepspeed_config: ds_config.json`.",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_mistake_is_told_with_its_place_and_a_remedy(model_dir: Path, text: str | bytes, message: str) -> None:
    assert message in refusal(model_dir, text)


def test_all_mistakes_are_told_at_once_in_the_order_they_stand(model_dir: Path) -> None:
    assert refusal(model_dir, "nmae: x\nentrypoint: 3\nlabels: 4") == (
        "experiment.yaml: 3 mistakes:\n"
        '  experiment.yaml:1:1: unknown key "nmae". Did you mean "name"?\n'
        "  experiment.yaml:2:13: entrypoint: expected text or a list, found the number 3. Put it in quotes.\n"
        "  experiment.yaml:3:9: labels: expected a list, found the number 4. Change it.\n"
        " Mend each of them."
    )


def test_mistakes_in_the_configuration_and_in_the_entrypoint_are_told_together(model_dir: Path) -> None:
    message = refusal(model_dir, "entrypoint: bash run.sh\nhyperparameters: {deepspeed_config: no.json}")
    assert "2 mistakes" in message
    assert "no.json" in message
    assert "'bash'" in message


def test_the_same_file_may_be_named_in_two_ways(model_dir: Path) -> None:
    experiment = read(model_dir, MINIMAL.replace("train.py", "train.py --deepspeed ./sub/../ds_config.json"))
    assert experiment.entrypoint.config_positions == (1,)
    (model_dir / "link.json").symlink_to("ds_config.json")
    assert read(model_dir, MINIMAL.replace("train.py", "train.py --deepspeed link.json"))
    (model_dir / "loop.json").symlink_to("loop.json")
    assert "Name the same file" in refusal(model_dir, MINIMAL.replace("train.py", "train.py --deepspeed loop.json"))


def test_a_missing_file_or_folder_is_told(model_dir: Path) -> None:
    yaml = model_dir.parent / "experiment.yaml"
    with pytest.raises(InputError, match="the file does not exist"):
        read_experiment(yaml, model_dir)
    with pytest.raises(InputError, match="this is a directory"):
        read_experiment(model_dir, model_dir)
    yaml.write_text(MINIMAL)
    with pytest.raises(InputError, match="the model directory does not exist"):
        read_experiment(yaml, model_dir / "nothing")
    with pytest.raises(InputError, match="this is a file, not a directory"):
        read_experiment(yaml, yaml)


YAML_PIECES = st.lists(
    st.sampled_from(
        [
            *MINIMAL.splitlines(),
            *("resources:", "searcher: ", "max_length: ", "environment: ", "arg_mappings: ", "data: ", "name: "),
            *("  ", "- ", ": ", "? ", "{", "}", "[", "]", "\n", "|", ">-", '"', "'", "&a ", "*a", "<<: ", "=", "~"),
            *("!!int ", "!!bool ", "!!timestamp ", "!!binary ", "!!set ", "!!str "),
            *(r"\ud800", r"\0", "1e5", "0x", "0b_", "1:30", "2024-99-99", ".nan", "on", "--deepspeed "),
        ]
    )
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.binary(), st.text().map(str.encode), YAML_PIECES.map("".join), YAML_PIECES.map("\n".join)))
def test_no_file_gives_anything_but_an_experiment_or_an_input_error(model_dir: Path, text: str | bytes) -> None:
    with contextlib.suppress(InputError):
        read(model_dir, text if isinstance(text, bytes) else text.encode())


def test_a_few_lines_of_aliases_do_not_stand_for_more_than_anybody_would_write(model_dir: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    began = time.monotonic()
    assert "with its aliases written out" in refusal(model_dir, "\n".join(lines))
    merged = ["b0: &b0 {x0: 1}"]
    merged += [f"b{level}: &b{level} {{<<: [{', '.join([f'*b{level - 1}'] * 9)}]}}" for level in range(1, 12)]
    assert "with its aliases written out" in refusal(model_dir, "\n".join(merged))
    assert time.monotonic() - began < 5


def test_a_device_in_the_place_of_a_file_is_not_read_to_its_end(model_dir: Path) -> None:
    with pytest.raises(InputError, match="it is larger than 4 MiB"):
        read_experiment(Path("/dev/zero"), model_dir)
    with pytest.raises(InputError, match="it is larger than 4 MiB"):
        read_deepspeed_json(Path("/dev/zero"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["name", "entrypoint", "hyperparameters", "resources", "searcher", "environment", "arg_mappings"]
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(KEYS | st.text(), VALUES))
def test_no_value_in_any_field_gives_anything_else_either(model_dir: Path, fields: dict[str, object]) -> None:
    import yaml

    with contextlib.suppress(InputError):
        read(model_dir, yaml.safe_dump(fields))


def test_reading_imports_neither_torch_nor_deepspeed_nor_prefect() -> None:
    code = (
        "import sys, zerotune.trial_lib.inputs.read_experiment as _;"
        "assert not {'torch', 'deepspeed', 'prefect', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
