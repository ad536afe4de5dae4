"""The JSON Schema of an experiment's YAML, for editors. `python -m trial_lib.inputs.schema` writes it anew.

An editor with YAML's language server finds it by a first line such as `# yaml-language-server:
$schema=PATH/experiment.schema.json`.
"""

import json
from pathlib import Path

from trial_lib.inputs.config import ExperimentConfig
from trial_lib.messages.files import write_whole

SCHEMA_PATH = Path(__file__).with_name("experiment.schema.json")


def schema_text() -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **ExperimentConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    write_whole(SCHEMA_PATH, schema_text(), mode=0o644)
