import json
from typing import Any

import jsonschema
import pytest
import yaml

from zerotune import api
from zerotune.trial_lib.inputs.config import SCHEMA_PATH, schema_text

DETERMINEDS = """
name: gpt2
entrypoint: [python3, -m, determined.launch.deepspeed, python3, train.py, --deepspeed, ds_config.json]
project: nlp
hyperparameters:
  deepspeed_config: ds_config.json
  learning_rate: 0.1
  overwrite_deepspeed_args: {zero_optimization: {stage: 2}}
resources: {slots_per_trial: 2}
searcher: {name: single, metric: loss, smaller_is_better: true, max_length: {batches: 100}}
environment: {environment_variables: [A=1]}
min_validation_period: 10
"""
OURS = """
entrypoint: python3 train.py --batch-size 4
hyperparameters: {deepspeed_config: {train_batch_size: 8}}
arg_mappings: {train_micro_batch_size_per_gpu: --batch-size}
resources: {memory_per_slot: 2 GiB}
environment: {environment_variables: {A: 1, B: text}}
"""


def validate(document: Any) -> None:
    jsonschema.Draft202012Validator(json.loads(schema_text())).validate(document)


def test_the_committed_schema_is_current() -> None:
    assert SCHEMA_PATH.read_text() == schema_text(), "run: python -m zerotune.trial_lib.inputs.config"


def test_the_committed_schemas_of_answers_are_current() -> None:
    for path, record in api.SCHEMAS.items():
        text = api.schema_text(record)
        assert path.read_text() == text, "run: python -m zerotune.api"
        jsonschema.Draft202012Validator.check_schema(json.loads(text))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("text", [DETERMINEDS, OURS], ids=["Determined's", "with the additions"])
def test_an_experiment_is_valid(text: str) -> None:
    validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "wrong",
    [
        {"resuorces": {}},
        {"resources": {"slots_per_trial": 0}},
        {"resources": {"memory_per_slot": "2 GX"}},
        {"arg_mappings": {"lr": "--lr"}},
        {"searcher": {"name": "asha"}},
        {"min_validation_period": "often"},
    ],
    ids=json.dumps,
)
def test_a_mistake_is_marked_in_the_editor(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate({"entrypoint": "python3 train.py", **wrong})


def test_every_field_is_described() -> None:
    schema = json.loads(schema_text())
    for section in (schema, *schema["$defs"].values()):
        for name, field in section.get("properties", {}).items():
            assert "description" in field or any("$ref" in kind for kind in field.get("anyOf", [field])), name
