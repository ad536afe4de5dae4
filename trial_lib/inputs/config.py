"""The fields of an experiment's YAML, with their types and meanings.

The fields are Determined's, so that a file written for it works unchanged. ZeroTune adds six: `arg_mappings`,
`follow_launcher`, `search_space`, `turned`, `resources.memory_per_slot` and `resources.hosts`. The descriptions here
become the JSON Schema that editors show, which `python -m zerotune.trial_lib.inputs.config` writes anew. An editor with
YAML's language server finds it by a first line such as `# yaml-language-server: $schema=PATH/experiment.schema.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from zerotune.trial_lib.deepspeed_config.layout import LAYOUT_KINDS
from zerotune.trial_lib.inputs.places import MAPPING_TARGET, SWITCH_PLACE
from zerotune.trial_lib.inputs.yaml_document import YamlSection
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.turned import TURNED, is_turned
from zerotune.trial_lib.records.switches import PROGRAM
from zerotune.trial_lib.search.knobs import get_knob

# Types of single fields: lengths, environment variables, sizes, and the values of knobs.

# The batch keys of a DeepSpeed configuration.
BatchKey = Literal["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"]

# The DeepSpeed keys that a script may take from its command line or its environment.
MappedKey = Literal[
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "zero_optimization.stage"
]


class Length(YamlSection):
    """A length of training or a period, in one of three units. A bare number means batches."""

    batches: NonNegativeInt | None = Field(default=None, description="Optimizer steps.")
    epochs: NonNegativeInt | None = Field(default=None, description="Passes over the training data.")
    records: NonNegativeInt | None = Field(default=None, description="Training samples.")

    @model_validator(mode="before")
    @classmethod
    def _bare_number_means_batches(cls, value: Any) -> Any:
        if isinstance(value, (dict, Length)):
            return value
        if type(value) is not int:
            raise ValueError("expected a number of batches, or one of batches, epochs and records")
        return {"batches": value}

    @model_validator(mode="after")
    def _has_one_unit(self) -> "Length":
        if [self.batches, self.epochs, self.records].count(None) != 2:
            raise ValueError("expected one of batches, epochs and records")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        number = {"type": "integer", "minimum": 0, "description": "Optimizer steps."}
        return {"description": mapping.pop("description"), "anyOf": [number, mapping]}


def known_turned(switches: dict[str, Any]) -> dict[str, Any]:
    for place, value in switches.items():
        if not is_turned(place):
            raise ValueError(f"ZeroTune has no switch {place}: it has {', '.join(TURNED)}")
        if not TURNED[place].has(value):
            raise ValueError(f"{place} cannot be {value}: its values are {', '.join(map(str, TURNED[place].values))}")
    return switches


def above_zero(length: Length) -> Length:
    if 0 in (length.batches, length.epochs, length.records):
        raise ValueError("expected a length above 0")
    return length


_DEVICES = {"cpu", "cuda", "gpu", "rocm"}


def _assignments_to_mapping(value: Any) -> Any:
    """Returns environment variables as name to text.

    The value is a list of `NAME=value`, a mapping, or such a list for each kind of device, as Determined writes it.
    """
    if isinstance(value, Mapping):
        if value and value.keys() <= _DEVICES and all(isinstance(each, (list, type(None))) for each in value.values()):
            return _those_of_all_devices(value)
        return {name: str(text) if type(text) is int else text for name, text in value.items()}
    if not isinstance(value, list):
        raise ValueError("expected a list of NAME=value or a mapping")
    for assignment in value:
        if not isinstance(assignment, str) or "=" not in assignment[1:]:
            raise ValueError(f"expected NAME=value, found {assignment!r}")
    return dict(assignment.split("=", 1) for assignment in value)


def _those_of_all_devices(lists: Mapping[str, list[Any] | None]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for assignments in lists.values():
        for name, text in _assignments_to_mapping(assignments or []).items():
            if variables.setdefault(name, text) != text:
                raise ValueError(
                    f"{name} has different values on different kinds of devices: write one list, for this one"
                )
    return variables


EnvironmentVariables = Annotated[
    dict[str, str],
    BeforeValidator(_assignments_to_mapping),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}},
                {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {key: {"type": ["array", "null"]} for key in sorted(_DEVICES)},
                },
            ]
        }
    ),
]

MemorySize = Annotated[
    ByteSize,
    Field(gt=0),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*\d*\.?\d+\s*([kKmMgGtT][iI]?)?[bB]?\s*$"},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]


_KNOB_VALUE = {"type": ["boolean", "number", "string", "null"]}
_KNOB_VALUES = {"type": "array", "minItems": 1, "items": {"type": ["boolean", "number", "string", "null", "array"]}}

_KNOB_KEYS = {
    "values": {"anyOf": [_KNOB_VALUE, _KNOB_VALUES], "description": "Its possible values."},
    "min": {"type": "number", "description": "The least value of a range."},
    "max": {"type": "number", "description": "The largest value of a range."},
    "log": {"type": "boolean", "description": "Whether a range grows by factors."},
    "count": {"type": "integer", "minimum": 2, "description": "Values of a range; 5."},
    "when": {
        "type": "object",
        "additionalProperties": {"anyOf": [_KNOB_VALUE, _KNOB_VALUES]},
        "description": "The knob is varied only under these settings. Each decides memory or mathematics, such as the "
        "ZeRO stage, and has a list of values.",
    },
}
_SWITCH_KEYS = {
    **_KNOB_KEYS,
    "coarse": {
        "type": "boolean",
        "description": "Whether it decides memory or mathematics. If not, the search tunes it last, in the best arms. "
        "Default: true, but false for an environment variable.",
    },
    "changes_mathematics": {
        "type": "boolean",
        "description": "Whether another value trains differently. Then losses are not compared. Default: false.",
    },
    "layout": {
        "enum": list(LAYOUT_KINDS),
        "description": "What the switch is the size of: groups of tensor parallelism, of Ulysses' sequence parallelism "
        "or of experts, or the stages of a pipeline. The global batch is kept under each size.",
    },
}


def _knob_schema(keys: Mapping[str, Any]) -> dict[str, Any]:
    mapping = {"type": "object", "additionalProperties": False, "properties": keys}
    return {"anyOf": [_KNOB_VALUE, _KNOB_VALUES, mapping]}


SearchSpaceSection = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"not": {"enum": list(get_args(BatchKey))}},
            "properties": {
                PROGRAM: {
                    "type": "object",
                    "propertyNames": {"pattern": SWITCH_PLACE},
                    "additionalProperties": _knob_schema(_SWITCH_KEYS),
                    "description": "Settings of your program to vary, each by its place in the command: an option "
                    "(--gradient_checkpointing), a variable (OMP_NUM_THREADS), an override (trainer.workers), a value "
                    "in a file (conf.yaml:trainer.workers), or a word by its number (argv:2). true and false make an "
                    "option be there or not, and null leaves it as typed. ZeroTune itself turns others "
                    "(model:compile).",
                }
            },
            "additionalProperties": _knob_schema(_KNOB_KEYS),
        }
    ),
]


# Hyperparameters as Determined writes them: `{type: const, val: 0.1}` is a value, `{type: log, ...}` a range. Pure.

_CONST = {"type", "val"}
# The keys that a range of each type has to have: `{type: Adam, params: ...}` is the user's own mapping.
_RANGES = {
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval"},
    "categorical": {"vals"},
}
_ONE_VALUE = "Write the one value to train with."
_OF_DEEPSPEED = "Write your value. The search varies it, within `search_space` if you name it there."


def plain_value(value: Any) -> Any:
    """Returns a hyperparameter with every constant in it, at any depth, replaced by its value.
    Raises PydanticCustomError: it contains a range, which is not one value to train with.
    """
    return _plain(value, "", _ONE_VALUE)


def plain_deepspeed_value(value: Any) -> Any:
    return _plain(value, "", _OF_DEEPSPEED)


def _plain(value: Any, place: str, remedy: str, holders: tuple[int, ...] = ()) -> Any:
    if not isinstance(value, Mapping) or id(value) in holders:  # an alias may point back to what holds it
        return value
    kind = value.get("type")
    if kind == "const" and value.keys() == _CONST:
        return value["val"]
    if isinstance(kind, str) and kind in _RANGES and _RANGES[kind] <= value.keys():
        name = f"{place} is" if place else "this is"
        what = f"{name} a range of type {kind}, but one training has one value"
        raise PydanticCustomError("range", "{what}", {"what": what, "remedy": remedy})
    dotted = f"{place}." if place else ""
    return {key: _plain(item, f"{dotted}{key}", remedy, (*holders, id(value))) for key, item in value.items()}


# The keys that only Determined's cluster needs, and why they have no effect here.
NOT_USED = {
    **dict.fromkeys(
        (
            *("bind_mounts", "resources.shm_size", "resources.devices", "environment.image", "environment.pod_spec"),
            *("environment.force_pull_image", "environment.registry_auth", "environment.ports"),
            *("environment.proxy_ports", "environment.add_capabilities", "environment.drop_capabilities"),
        ),
        "a trial runs without a container",
    ),
    **dict.fromkeys(
        ("preemption_timeout", "slurm", "pbs", "resources.priority", "resources.weight"),
        "there is no cluster scheduler",
    ),
    **dict.fromkeys(("resources.resource_pool", "resources.agent_label"), "a trial runs where ZeroTune runs"),
    **dict.fromkeys(("project", "workspace"), "a study is found by its name"),
    **dict.fromkeys(("data_layer", "internal"), "Determined ignores it as well"),
    "checkpoint_policy": "a full experiment keeps the best checkpoint and the last two",
    "checkpoint_storage": "checkpoints are written where your code says",
    "debug": "`study.log` has every detail",
    "integrations": "see deployments for Prefect's automations",
    "log_policies": "a failed trial is shown with its log",
    "optimizations": "they were Horovod's, and DeepSpeed has its own",
    "perform_initial_validation": "a training begins with a step",
    "profiling": "every trial is measured",
    "retention_policy": "logs stay with their study",
    "security": "a trial runs as the user who runs ZeroTune",
    "tensorboard_storage": "TensorBoard's files are in the study",
    "resources.is_single_node": "see resources.hosts",
    "resources.max_slots": "see --max-slots",
    "resources.native_parallel": "ZeroTune starts the ranks itself",
    "resources.slots": "see resources.slots_per_trial",
    "searcher.source_checkpoint_uuid": "ZeroTune has no checkpoints of Determined's",
    "searcher.source_trial_id": "ZeroTune has no trials of Determined's",
}


def _not_used_in(section: str) -> dict[str, str]:
    parted = ((key.rpartition("."), why) for key, why in NOT_USED.items())
    return {key: why for (owner, _, key), why in parted if owner == section}


def keys_without_effect(data: Mapping[str, Any]) -> list[str]:
    """Returns the dotted keys of a YAML that are set and have no effect, such as `resources.resource_pool`."""
    return sorted(key for key in NOT_USED if get_knob(data, key) is not None)


class Hyperparameters(YamlSection):
    """Values for the training code.

    Every key is allowed, with a value or with a constant as Determined writes it (`{type: const, val: 0.1}`). ZeroTune
    reads the two below.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[JsonValue, BeforeValidator(plain_value)]]

    deepspeed_config: Annotated[str | dict[str, JsonValue] | None, BeforeValidator(plain_deepspeed_value)] = Field(
        default=None,
        description="Your DeepSpeed configuration: the path of its JSON file, relative to the model directory, or the "
        "configuration itself. A search needs it.",
    )
    overwrite_deepspeed_args: Annotated[dict[str, JsonValue], BeforeValidator(plain_deepspeed_value)] = Field(
        default_factory=dict,
        description="Settings that replace those of deepspeed_config, in its own shape. Sections are merged.",
    )

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class Resources(YamlSection):
    """The devices and hosts of a trial."""

    not_used = _not_used_in("resources")

    slots_per_trial: PositiveInt = Field(
        default=1, description="Accelerators that one trial takes. On a machine without one, CPU ranks."
    )
    memory_per_slot: MemorySize | None = Field(
        default=None,
        description="Memory that a slot may use, such as 2 GiB, 500 MB or a number of bytes. By default a slot has the "
        "accelerator's whole memory, or its share of the machine's. An addition of ZeroTune.",
    )
    hosts: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="The hosts that one trial spans, by name or address, each with its slots, such as {node-1: 8, "
        "node-2: 8}. The first is this one. All need the same files, and ZeroTune reaches the others by ssh. By "
        "default a trial runs on one host. An addition of ZeroTune.",
    )

    @model_validator(mode="after")
    def _slots_are_those_of_the_hosts(self) -> "Resources":
        if self.hosts and self.slots_per_trial != sum(self.hosts.values()):
            raise ValueError(
                f"slots_per_trial is {self.slots_per_trial}, but the hosts have {sum(self.hosts.values())} slots"
            )
        return self


_OF_HYPERPARAMETERS = "runs one training for each choice of hyperparameters, but ZeroTune makes one training fast"
_OTHER_SEARCHERS = {
    **dict.fromkeys(
        ("adaptive", "adaptive_asha", "adaptive_simple", "async_halving", "sync_halving"), _OF_HYPERPARAMETERS
    ),
    **dict.fromkeys(("grid", "random"), _OF_HYPERPARAMETERS),
    "custom": "leaves the search to another program, but here ZeroTune searches",
}


class Searcher(YamlSection):
    """The length of the full experiment, and its metric."""

    not_used = _not_used_in("searcher")

    @model_validator(mode="before")
    @classmethod
    def _searches_no_hyperparameters(cls, value: Any) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else None
        if isinstance(name, str) and name in _OTHER_SEARCHERS:
            raise PydanticCustomError(
                "searcher",
                "{what}",
                {
                    "what": f"{name} {_OTHER_SEARCHERS[name]}",
                    "remedy": "Write `name: single`, with its `metric` and `max_length` alone, give each "
                    "hyperparameter one value, and name ZeroTune's search on the command line, such as "
                    "`zerotune adaptive`.",
                },
            )
        return value

    name: Literal["single"] = Field(
        default="single",
        description="`single`: the file describes one training run. You choose the search on the command line.",
    )
    metric: str = Field(
        default="validation_loss",
        description="The validation metric of the full experiment. --metric names the metric of the search.",
    )
    smaller_is_better: bool = Field(default=True, description="Whether a smaller value of the metric is better.")
    max_length: Annotated[Length, AfterValidator(above_zero)] | None = Field(
        default=None, description="The length of the full experiment, for training code that asks for it."
    )


class Environment(YamlSection):
    """The environment of a trial's processes."""

    not_used = _not_used_in("environment")

    environment_variables: EnvironmentVariables = Field(
        default_factory=dict,
        description="Environment variables of every rank: a list of NAME=value, or a mapping. Values that look like "
        "secrets are kept out of logs and reports.",
    )


class Reproducibility(YamlSection):
    """The seeds of random numbers."""

    experiment_seed: NonNegativeInt = Field(
        default=0, description="Seeds Python, numpy, torch and the data loaders of a trial class."
    )


class ExperimentConfig(YamlSection):
    """An experiment: the training code's entrypoint, its hyperparameters and its resources."""

    model_config = ConfigDict(title="ZeroTune experiment")
    not_used = _not_used_in("")

    name: str | None = Field(default=None, description="The experiment's name. The default is the model directory's.")
    description: str = Field(default="", description="For people.")
    entrypoint: str | list[str] = Field(
        description="The command that trains, run in the model directory: `python3 train.py --epochs 3`, or the same "
        "as a list. No shell reads it, and ZeroTune starts the ranks itself."
    )
    hyperparameters: Hyperparameters = Field(
        default_factory=Hyperparameters, description="Values for the training code, with `deepspeed_config`."
    )
    follow_launcher: bool = Field(
        default=False,
        description="Whether the launcher's options in the entrypoint decide on which devices the ranks start, as in a "
        "shell. `zerotune tune -- COMMAND` sets it. An addition of ZeroTune.",
    )
    arg_mappings: dict[MappedKey, Annotated[str, Field(pattern=MAPPING_TARGET)]] = Field(
        default_factory=dict,
        description="The places in the command that set DeepSpeed's batch keys or the ZeRO stage "
        "(`zero_optimization.stage`), if the script reads them there. An "
        "option (`train_micro_batch_size_per_gpu: --batch-size`), an environment variable (`BATCH`), an override of "
        "Hydra's kind (`trainer.batch`, `++batch`), a value in a YAML or JSON file that the command names "
        "(`conf.yaml:trainer.batch`), or a word by its number behind the script (`argv:2`). An addition of ZeroTune.",
    )
    search_space: SearchSpaceSection = Field(
        default_factory=dict,
        description="Knobs to narrow, widen or fix: a dotted DeepSpeed key, such as zero_optimization.overlap_comm, "
        "with a value, a list of values (the best guess first), a range or a condition. The section `program` has "
        "settings of your program. The search's own space has the rest. An addition of ZeroTune.",
    )
    turned: Annotated[dict[str, bool | int | str], AfterValidator(known_turned)] = Field(
        default_factory=dict,
        description="Switches that ZeroTune turns in your program, such as {model:compile: true}. A training by "
        "`zerotune train` has them, and so has every trial that varies them not. An addition of ZeroTune.",
    )
    resources: Resources = Field(default_factory=Resources, description="The devices and hosts of a trial.")
    searcher: Searcher = Field(default_factory=Searcher, description="The length of the full experiment.")
    max_restarts: NonNegativeInt = Field(
        default=5,
        description="How often ZeroTune restarts a full experiment that crashes. It stops earlier if the training "
        "fails twice in the same way without progress. It never restarts a trial.",
    )
    environment: Environment = Field(default_factory=Environment, description="The environment of the processes.")
    min_validation_period: Length | None = Field(
        default=None,
        description="The longest time between validations of the full experiment, for code that asks for it.",
    )
    min_checkpoint_period: Length | None = Field(
        default=None,
        description="The longest time between checkpoints of the full experiment, for code that asks for it.",
    )
    data: dict[str, JsonValue] = Field(default_factory=dict, description="Any values, for code that asks for them.")
    labels: list[str] = Field(default_factory=list, description="Words that the tracking server shows with the study.")
    records_per_epoch: Annotated[NonNegativeInt | None, AfterValidator(lambda number: number or None)] = Field(
        default=None,
        description="Training samples in one epoch, for code that measures its length in epochs. 0 means unknown.",
    )
    scheduling_unit: PositiveInt = Field(
        default=100, description="Optimizer steps from one report of a trial class's training metrics to the next."
    )
    reproducibility: Reproducibility = Field(
        default_factory=Reproducibility, description="The seeds of random numbers."
    )

    @model_validator(mode="after")
    def _maps_each_target_once(self) -> "ExperimentConfig":
        targets = list(self.arg_mappings.values())
        for target in targets:
            if targets.count(target) > 1:
                raise ValueError(f"arg_mappings gives {target} two meanings")
        return self


SCHEMA_PATH = Path(__file__).with_name("experiment.schema.json")


def schema_text() -> str:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **ExperimentConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    write_whole(SCHEMA_PATH, schema_text(), mode=0o644)
