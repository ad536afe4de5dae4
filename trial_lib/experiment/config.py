"""The experiment's YAML as typed data: every field that a user may write, with its meaning.

The fields are the predecessor's, so that a file written for it works as it is, and five additions: `arg_mappings`,
`follow_launcher`, `search_space`, `resources.memory_per_slot` and `resources.hosts`. The descriptions here become the
JSON Schema that editors show (see `schema`).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
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
from pydantic_core import CoreSchema

BatchKey = Literal["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"]
"""The DeepSpeed keys that a script may take from its command line or its environment."""

MAPPING_TARGET = r"^(--?[A-Za-z][^\s=]*|[A-Za-z_][A-Za-z0-9_]*)$"
"""What sets such a key: a flag, or the name of an environment variable."""


class _NotUsed:
    """Marks a field that only the predecessor's cluster needed."""


NotUsed = Annotated[Any, _NotUsed()]
"""A field that is accepted, so that an existing file works, and has no effect."""


class Section(BaseModel):
    """A mapping in the YAML: unknown keys and wrong types are refused, nothing is converted in silence."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def not_used(self) -> Iterator[str]:
        """Yields the keys that are set and have no effect, dotted, such as `resources.resource_pool`."""
        for name in sorted(self.model_fields_set):
            field = type(self).model_fields.get(name)
            value = getattr(self, name)
            if field is not None and any(isinstance(mark, _NotUsed) for mark in field.metadata):
                yield name
            elif isinstance(value, Section):
                yield from (f"{name}.{key}" for key in value.not_used())


class Length(Section):
    """How long to train, or how often to do something: one of three units. A bare number means batches."""

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


def _above_zero(length: Length) -> Length:
    if 0 in (length.batches, length.epochs, length.records):
        raise ValueError("expected a length above 0")
    return length


def _assignments_to_mapping(value: Any) -> Any:
    """Returns environment variables as name to text, from a list of `NAME=value` or from a mapping."""
    if isinstance(value, Mapping):
        return {name: str(text) if type(text) is int else text for name, text in value.items()}
    if not isinstance(value, list):
        raise ValueError("expected a list of NAME=value or a mapping")
    for assignment in value:
        if not isinstance(assignment, str) or "=" not in assignment[1:]:
            raise ValueError(f"expected NAME=value, found {assignment!r}")
    return dict(assignment.split("=", 1) for assignment in value)


EnvironmentVariables = Annotated[
    dict[str, str],
    BeforeValidator(_assignments_to_mapping),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}},
                {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
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

SearchSpaceSection = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"not": {"enum": list(get_args(BatchKey))}},
            "additionalProperties": {
                "anyOf": [
                    _KNOB_VALUE,
                    _KNOB_VALUES,
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "values": {"anyOf": [_KNOB_VALUE, _KNOB_VALUES], "description": "What it may be."},
                            "min": {"type": "number", "description": "The least value of a range."},
                            "max": {"type": "number", "description": "The largest value of a range."},
                            "log": {"type": "boolean", "description": "Whether a range grows by factors."},
                            "count": {"type": "integer", "minimum": 2, "description": "Values of a range; 5."},
                            "when": {
                                "type": "object",
                                "additionalProperties": {"anyOf": [_KNOB_VALUE, _KNOB_VALUES]},
                                "description": "Settings that decide memory or mathematics, such as the ZeRO stage, "
                                "each with the values under which the knob is varied.",
                            },
                        },
                    },
                ]
            },
        }
    ),
]


class Hyperparameters(Section):
    """What the training code reads. Any key may stand here; the two below are ZeroTune's."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    deepspeed_config: str | dict[str, JsonValue] | None = Field(
        default=None,
        description="Your DeepSpeed configuration: the path of its JSON file, relative to the model directory, or the "
        "configuration itself. A search needs it.",
    )
    overwrite_deepspeed_args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Settings that replace those of deepspeed_config, in its own shape; sections are merged.",
    )

    def as_dict(self) -> dict[str, Any]:
        """Returns the hyperparameters as they stand in the file."""
        return self.model_dump(exclude_unset=True)


class Resources(Section):
    """What a trial runs on."""

    slots_per_trial: PositiveInt = Field(
        default=1, description="Accelerators that one trial takes; without an accelerator, CPU ranks."
    )
    memory_per_slot: MemorySize | None = Field(
        default=None,
        description="Memory that a slot may use, such as 2 GiB, 500 MB or a number of bytes. Left out, a slot has the "
        "accelerator's whole memory, or its share of the machine's. An addition of ZeroTune.",
    )
    hosts: dict[str, PositiveInt] = Field(
        default_factory=dict,
        description="The hosts that one trial spans, by name or address, each with its slots, such as {node-1: 8, "
        "node-2: 8}; the first is this one. All have the same files, and the others are reached by ssh. Left out, a "
        "trial runs on one host. An addition of ZeroTune.",
    )
    max_slots: NotUsed = Field(default=None, description="Not used: see --max-slots.")
    resource_pool: NotUsed = Field(default=None, description="Not used: a trial runs where ZeroTune runs.")
    priority: NotUsed = Field(default=None, description="Not used: there is no cluster scheduler.")
    weight: NotUsed = Field(default=None, description="Not used: there is no cluster scheduler.")
    shm_size: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    devices: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")

    @model_validator(mode="after")
    def _slots_are_those_of_the_hosts(self) -> "Resources":
        if self.hosts and self.slots_per_trial != sum(self.hosts.values()):
            raise ValueError(
                f"slots_per_trial is {self.slots_per_trial}, and the hosts have {sum(self.hosts.values())} together"
            )
        return self


class Searcher(Section):
    """How long the full experiment trains, and how it is judged."""

    name: Literal["single"] = Field(
        default="single",
        description="`single`: the file describes one training run; the search is named on the command line.",
    )
    metric: str = Field(
        default="validation_loss",
        description="The validation metric of the full experiment. What a search optimises is named by --metric.",
    )
    smaller_is_better: bool = Field(default=True, description="Whether a smaller value of the metric is better.")
    max_length: Annotated[Length, AfterValidator(_above_zero)] | None = Field(
        default=None, description="How long the full experiment trains; for training code that asks for its length."
    )


class Environment(Section):
    """What a trial's processes find around them."""

    environment_variables: EnvironmentVariables = Field(
        default_factory=dict,
        description="Environment variables of every rank: a list of NAME=value, or a mapping. Values that look like "
        "secrets are kept out of logs and reports.",
    )
    image: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    force_pull_image: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    registry_auth: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    pod_spec: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    ports: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")


class Reproducibility(Section):
    """Where random numbers come from."""

    experiment_seed: NonNegativeInt = Field(
        default=0, description="Seeds Python, numpy, torch and the data loaders of a trial class."
    )


class ExperimentConfig(Section):
    """An experiment: the training code's entrypoint, its hyperparameters and what it runs on."""

    model_config = ConfigDict(title="ZeroTune experiment")

    name: str | None = Field(default=None, description="The experiment's name; the model directory's, if left out.")
    description: str = Field(default="", description="For people.")
    entrypoint: str | list[str] = Field(
        description="The command that trains, run in the model directory: `python3 train.py --epochs 3`, or the same "
        "as a list. No shell reads it, and ZeroTune starts the ranks itself."
    )
    hyperparameters: Hyperparameters = Field(
        default_factory=Hyperparameters, description="What the training code reads, with `deepspeed_config`."
    )
    follow_launcher: bool = Field(
        default=False,
        description="Whether the options of the launcher in the entrypoint say on which devices the ranks start, as in "
        "a shell. `zerotune tune -- COMMAND` writes it. An addition of ZeroTune.",
    )
    arg_mappings: dict[BatchKey, Annotated[str, Field(pattern=MAPPING_TARGET)]] = Field(
        default_factory=dict,
        description="For a script that takes its batch size from the command line or from an environment variable: the "
        "flag or the variable for each DeepSpeed key, such as `train_micro_batch_size_per_gpu: --batch-size`. An "
        "addition of ZeroTune.",
    )
    search_space: SearchSpaceSection = Field(
        default_factory=dict,
        description="Knobs to narrow, widen or fix: a dotted DeepSpeed key, such as zero_optimization.overlap_comm, "
        "with a value, a list of values, the best guess first, a range or a condition. The search's own space has the "
        "rest. An addition of ZeroTune.",
    )
    resources: Resources = Field(default_factory=Resources, description="What a trial runs on.")
    searcher: Searcher = Field(default_factory=Searcher, description="How long the full experiment trains.")
    max_restarts: NonNegativeInt = Field(
        default=5,
        description="How often a full experiment that crashed is started again, unless it has ended the same way twice "
        "with no progress between. A trial never is.",
    )
    environment: Environment = Field(default_factory=Environment, description="What the processes find around them.")
    min_validation_period: Length | None = Field(
        default=None, description="How often the full experiment validates at least; for code that asks for it."
    )
    min_checkpoint_period: Length | None = Field(
        default=None,
        description="How often the full experiment writes a checkpoint at least; for code that asks for it.",
    )
    data: dict[str, JsonValue] = Field(
        default_factory=dict, description="Any values; handed to code that asks for them."
    )
    labels: list[str] = Field(default_factory=list, description="Words that the tracking server shows with the study.")
    records_per_epoch: PositiveInt | None = Field(
        default=None, description="Training samples in one epoch; for code that asks for its length in epochs."
    )
    scheduling_unit: PositiveInt = Field(
        default=100, description="Optimizer steps from one report of a trial class's training metrics to the next."
    )
    reproducibility: Reproducibility = Field(
        default_factory=Reproducibility, description="Where random numbers come from."
    )
    project: NotUsed = Field(default=None, description="Not used: a study is found by its name.")
    workspace: NotUsed = Field(default=None, description="Not used: a study is found by its name.")
    bind_mounts: NotUsed = Field(default=None, description="Not used: a trial runs without a container.")
    checkpoint_storage: NotUsed = Field(
        default=None, description="Not used: checkpoints are written where your code says."
    )
    profiling: NotUsed = Field(default=None, description="Not used: every trial is measured.")

    @model_validator(mode="after")
    def _maps_each_target_once(self) -> "ExperimentConfig":
        targets = list(self.arg_mappings.values())
        for target in targets:
            if targets.count(target) > 1:
                raise ValueError(f"arg_mappings gives {target} two meanings")
        return self
