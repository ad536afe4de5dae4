"""What a rank finds out about the user's program while it runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.measure.batches.program_options import options_read
from trial_lib.wire.arrival import Arrival


@dataclass
class ProgramFacts:
    """What a program would have used by itself, for the driver to start its search from.

    Attributes:
        ds_config: the DeepSpeed configuration that the code handed over, before a candidate's overrides; where the
            Hugging Face Trainer reads it, with its "auto" values. None while none was.
        typed_batch: the batch of the engine that trains (`train_batch_size`, `micro_batch_size`,
            `gradient_accumulation_steps`) in a run of the program as it was typed; None in any other run.
        rows_per_sample: rows of a batch that one sample takes; 0 where rows do not show samples.
        batch_dimension: which dimension of a batch's first tensor has the rows.
        other_rows_per_sample: what `rows_per_sample` is if the other one has them; see `Arrival`.
        micro_batches_per_step: that came in the first optimizer step of a run as typed; None in any other run.
        tokens_per_micro_batch: tokens in the first micro-batch; None where the batches show none.
        batch_varies: whether the number of samples differs from micro-batch to micro-batch.
        batch: the batch keys (`train_micro_batch_size_per_gpu`, `gradient_accumulation_steps`) that the program would
            have used where the configuration says "auto" or nothing.
        arg_mappings: flags of its command line that were seen to set a batch key, by that key.
        longest_sequence: the most tokens that a sample had in the first batches of its data; None where the batches
            show no tokens, or all have as many.
        shortest_sequence: the fewest.
        is_stretchable: whether the program has trained on a batch that was made as long as the longest.
        reads_activation_checkpointing: whether it has DeepSpeed's activation checkpointing configured by the
            configuration.
        optimizer: the class of the optimizer that the code makes, by its module and name; empty where DeepSpeed makes
            it.
        by_accelerate: whether Accelerate hands that optimizer to DeepSpeed.
        partitions_its_model: whether the code makes its model within `deepspeed.zero.Init`.
        has_experts: whether the model has layers of DeepSpeed's mixture of experts (`deepspeed.moe`).
        repeats_backward: whether the code calls backward more than once for one step of an engine that ends an
            accumulation, and so adds gradients up by itself.
        steps_elsewhere: optimizer steps that engines other than the measured one have taken.
        options: the whole numbers among the options that it has read, by name, in a run of the program as it was typed.
        hands_over_two_configs: whether the code hands `deepspeed.initialize` one in its `args` and another as `config`.
        settled: what the engine has where a configuration may say "auto", as a part of one; see `precision.settled`. In
            a run of the program as it was typed.
        formats: of the numbers that the model is kept in and computes with, such as `bfloat16`, by their names.
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
        """Keeps a copy of the configuration, if it is the first that the program handed over."""
        if self.ds_config is None:
            # What JSON has no word for (a dtype, a path) is of no use to a search.
            self.ds_config = json.loads(json.dumps(config, default=str))

    def note_trained_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration of the engine that trains, whatever the program handed over before."""
        self.ds_config = None
        self.note_config(config)

    def note_typed_engine(self, engine: Any) -> int:
        """Keeps what the engine that trains has, and the options read by now; returns its micro-batch size.

        In a run of the program as it was typed.
        """
        # Brings torch, which an engine has brought.
        from trial_lib.measure.figures import precision

        self.settled = precision.settled(engine)
        self.note_formats(precision.formats(engine))
        self.options = {name: option.value for option in reversed([*options_read()]) for name in option.names}
        train, micro = int(engine.train_batch_size()), int(engine.train_micro_batch_size_per_gpu())
        accumulation = int(engine.gradient_accumulation_steps())
        if getattr(engine, "zenflow", False):
            # deepspeed/runtime/zenflow/engine.py: its interval stands in the place of the accumulation then.
            accumulation = train // (micro * int(engine.dp_world_size))
        self.typed_batch = {
            "train_batch_size": train,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
        }
        return micro

    def note_formats(self, formats: Iterable[str]) -> None:
        """Keeps further formats of numbers."""
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
