"""Types of single fields of an experiment's YAML: lengths, environment variables, sizes, and the values of knobs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    NonNegativeInt,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trial_lib.command.mapping_targets import SWITCH_PLACE
from trial_lib.command.switches import PROGRAM
from trial_lib.deepspeed_config.layout import LAYOUT_KINDS
from trial_lib.experiment.yaml_section import YamlSection
from trial_lib.wire.turned import TURNED, is_turned

BatchKey = Literal["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"]
"""The batch keys of a DeepSpeed configuration."""

MappedKey = Literal[
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "zero_optimization.stage"
]
"""The DeepSpeed keys that a script may take from its command line or its environment."""


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
        """Returns the mapping's schema with the bare number beside it."""
        mapping = handler.resolve_ref_schema(handler(core_schema))
        number = {"type": "integer", "minimum": 0, "description": "Optimizer steps."}
        return {"description": mapping.pop("description"), "anyOf": [number, mapping]}


def known_turned(switches: dict[str, Any]) -> dict[str, Any]:
    """Returns switches that ZeroTune turns, each with a value that it can have."""
    for place, value in switches.items():
        if not is_turned(place):
            raise ValueError(f"ZeroTune has no switch {place}: it has {', '.join(TURNED)}")
        if not TURNED[place].has(value):
            raise ValueError(f"{place} cannot be {value}: its values are {', '.join(map(str, TURNED[place].values))}")
    return switches


def none_for_zero(number: int | None) -> int | None:
    """Returns a number that is not 0."""
    return number or None


def above_zero(length: Length) -> Length:
    """Returns a length that is not 0."""
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
