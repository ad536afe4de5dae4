"""Facts about the user's program that a rank collects while it runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.measure.batches.program_options import options_read
from trial_lib.wire.arrival import Arrival


@dataclass
class ProgramFacts:
    """The program's own settings, as the starting point of the driver's search.

    Attributes:
        ds_config: the DeepSpeed configuration that the code passed, before a candidate's overrides. If the Hugging Face
            Trainer reads it, it has its "auto" values. None before the code passed one.
        typed_batch: the batch of the engine that trains (`train_batch_size`, `micro_batch_size`,
            `gradient_accumulation_steps`), in a run of the program as typed; None in any other run.
        rows_per_sample: rows of a batch that one sample takes; 0 if rows do not show samples.
        batch_dimension: the dimension of a batch's first tensor that has the rows.
        other_rows_per_sample: `rows_per_sample` if the other dimension has the rows; see `Arrival`.
        micro_batches_per_step: micro-batches in the first optimizer step of a run as typed; None in any other run.
        tokens_per_micro_batch: tokens in the first micro-batch; None if the batches show none.
        batch_varies: whether the number of samples differs from micro-batch to micro-batch.
        batch: the program's own values of the batch keys (`train_micro_batch_size_per_gpu`,
            `gradient_accumulation_steps`), if the configuration has "auto" or no value for them.
        arg_mappings: flags of the command line that set a batch key, by that key.
        longest_sequence: the most tokens of a sample in the first batches of the data. None if the batches show no
            tokens, or all samples have equally many.
        shortest_sequence: the fewest.
        is_stretchable: whether the program has trained on a batch that was stretched to the longest.
        reads_activation_checkpointing: whether the configuration controls DeepSpeed's activation checkpointing.
        optimizer: the class of the optimizer that the code makes, by its module and name; empty if DeepSpeed makes it.
        by_accelerate: whether Accelerate passes that optimizer to DeepSpeed.
        partitions_its_model: whether the code makes its model within `deepspeed.zero.Init`.
        has_experts: whether the model has layers of DeepSpeed's mixture of experts (`deepspeed.moe`).
        repeats_backward: whether the code calls backward more than once for one step of an engine that ends an
            accumulation. It then adds gradients up by itself.
        steps_elsewhere: optimizer steps that engines other than the measured one have taken.
        options: the whole numbers among the options that the program has read, by name, in a run as typed.
        hands_over_two_configs: whether the code passes one configuration to `deepspeed.initialize` in `args` and
            another as `config`.
        settled: the engine's values for keys that may be "auto", as a part of a configuration, in a run as typed; see
            `precision.settled`.
        formats: number formats that the model is kept in and computes with, by names such as `bfloat16`.
    """

    ds_config: dict[str, Any] | None = None
    typed_batch: dict[str, int] | None = None
    rows_per_sample: int = 1
    batch_dimension: int = 0
    other_rows_per_sample: int = 1
    micro_batches_per_step: int | None = None
    tokens_per_micro_batch: int | None = None
    batch_varies: bool = False
    batch: dict[str, int] = field(default_factory=dict)
    arg_mappings: dict[str, str] = field(default_factory=dict)
    longest_sequence: int | None = None
    shortest_sequence: int | None = None
    is_stretchable: bool = False
    reads_activation_checkpointing: bool = False
    optimizer: str = ""
    by_accelerate: bool = False
    partitions_its_model: bool = False
    has_experts: bool = False
    repeats_backward: bool = False
    steps_elsewhere: int = 0
    options: dict[str, int] = field(default_factory=dict)
    hands_over_two_configs: bool = False
    settled: dict[str, Any] = field(default_factory=dict)
    formats: list[str] = field(default_factory=list)

    def note_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration, if it is the first that the program has passed."""
        if self.ds_config is None:
            # A search cannot use values that JSON cannot hold, such as a dtype or a path.
            self.ds_config = json.loads(json.dumps(config, default=str))

    def note_trained_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration of the engine that trains, whatever the program has passed before."""
        self.ds_config = None
        self.note_config(config)

    def note_typed_engine(self, engine: Any) -> int:
        """Keeps the engine's settings and the options that were read by now. Returns its micro-batch size.

        Only a run of the program as typed calls it.
        """
        # This imports torch, which an engine has imported already.
        from trial_lib.measure.figures import precision

        self.settled = precision.settled(engine)
        self.note_formats(precision.formats(engine))
        self.options = {name: option.value for option in reversed([*options_read()]) for name in option.names}
        train, micro = int(engine.train_batch_size()), int(engine.train_micro_batch_size_per_gpu())
        accumulation = int(engine.gradient_accumulation_steps())
        if getattr(engine, "zenflow", False):
            # deepspeed/runtime/zenflow/engine.py: its interval then replaces the accumulation.
            accumulation = train // (micro * int(engine.dp_world_size))
        self.typed_batch = {
            "train_batch_size": train,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
        }
        return micro

    def note_formats(self, formats: Iterable[str]) -> None:
        """Keeps further number formats."""
        self.formats = sorted({*self.formats, *formats})

    def note_arrival(self, arrival: Arrival) -> None:
        """Keeps how samples show in batches."""
        self.rows_per_sample, self.batch_dimension = arrival.rows_per_sample, arrival.dimension
        self.other_rows_per_sample = arrival.other_rows_per_sample
        self.tokens_per_micro_batch = arrival.typed_tokens

    def note_optimizer(self, optimizer: object, by_accelerate: bool = False) -> None:
        """Keeps the class of an optimizer, if it is the first that the program made."""
        if not self.optimizer:
            kind = type(optimizer)
            self.optimizer, self.by_accelerate = f"{kind.__module__}.{kind.__qualname__}", by_accelerate

    def to_json(self) -> dict[str, Any]:
        """Returns the facts as plain data, for a rank's record."""
        return asdict(self)
