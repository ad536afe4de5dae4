"""Facts about the user's program that a rank collects while it runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.deepspeed_config.engine_replicas import replicas_of, sequence_parallel_size
from trial_lib.measure.batches.program_options import options_read, parsers_used, values_read
from trial_lib.measure.batches.refused_options import refused_options
from trial_lib.measure.libraries import fused_adam
from trial_lib.measure.tensor_parallel import tensor_parallel_size
from trial_lib.wire.arrival import Arrival
from trial_lib.wire.turned import FUSED, OPTIMIZER_OPTION

# Torch has others in a fused form too.
_ADAMS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")


@dataclass
class ProgramFacts:
    """The program's own settings, as the starting point of the driver's search.

    The fields are those of `trial_lib.records.result.ProgramProfile`, which explains them. A rank cannot import that
    record, because its environment may have no pydantic. Here `typed_batch` is a mapping.
    """

    ds_config: dict[str, Any] | None = None
    typed_batch: dict[str, int] | None = None
    rows_per_sample: int = 1
    batch_dimension: int = 0
    other_rows_per_sample: int = 1
    micro_batches_per_step: int | None = None
    tokens_per_micro_batch: int | None = None
    batch_varies: bool = False
    fixed_batch: str = ""  # the driver notes it
    divided_among: int = 1
    batch: dict[str, int] = field(default_factory=dict)
    arg_mappings: dict[str, str] = field(default_factory=dict)
    samples_per_epoch: int | None = None
    longest_sequence: int | None = None
    shortest_sequence: int | None = None
    is_stretchable: bool = False
    reads_activation_checkpointing: bool = False
    optimizer: str = ""
    by_accelerate: bool = False
    by_lightning: bool = False
    partitions_its_model: bool = False
    has_experts: bool = False
    by_autoep: bool = False
    repeats_backward: bool = False
    compiles_engine: bool = False
    steps_elsewhere: int = 0
    options: dict[str, int] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)
    refused_options: dict[str, str] = field(default_factory=dict)
    hands_over_two_configs: bool = False
    resumed_stage: int | None = None
    devices_in_code: str = ""
    settled: dict[str, Any] = field(default_factory=dict)
    formats: list[str] = field(default_factory=list)
    loading: dict[str, Any] | None = None
    turnable: dict[str, list[Any]] = field(default_factory=dict)
    not_turnable: dict[str, str] = field(default_factory=dict)
    trainer_options: list[str] = field(default_factory=list)

    def note_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration, if it is the first that the program has passed."""
        if self.ds_config is None:
            # A search cannot use values that JSON cannot hold, such as a dtype or a path.
            self.ds_config = json.loads(json.dumps(config, default=str))

    def note_trained_config(self, config: dict[str, Any]) -> None:
        """Keeps a copy of the configuration of the engine that trains, whatever the program has passed before."""
        self.ds_config = None
        self.note_config(config)

    def note_varied(self, options: Mapping[str, Sequence[Any]]) -> None:
        """Keeps what the program's own parser has read for some options, and why it would refuse values of them.

        Args:
            options: the values that a search tries, by the option.
        """
        self.switches = values_read(options)
        self.refused_options = refused_options(options, parsers_used)

    def note_typed_engine(self, engine: Any, varied: Mapping[str, Sequence[Any]] | None = None) -> int:
        """Keeps the engine's settings and the options that were read by now. Returns its micro-batch size.

        Only a run of the program as typed calls it.

        Args:
            engine: trains.
            varied: the options that the search varies, as `note_varied` has them.
        """
        # This imports torch, which an engine has imported already.
        from trial_lib.measure.figures import precision

        self.settled = precision.settled(engine)
        self.note_formats(precision.formats(engine))
        self.note_varied(varied or {})
        self.options = {name: option.value for option in reversed([*options_read()]) for name in option.names}
        self._note_adam(engine)
        train, micro = int(engine.train_batch_size()), int(engine.train_micro_batch_size_per_gpu())
        accumulation = int(engine.gradient_accumulation_steps())
        if getattr(engine, "zenflow", False):
            # deepspeed/runtime/zenflow/engine.py: its interval then replaces the accumulation.
            accumulation = train // (micro * replicas_of(engine))
        if tensor_parallel_size(engine) > 1 or sequence_parallel_size(engine) > 1:
            # To DeepSpeed each rank may be a replica then (deepspeed/runtime/config.py).
            train = micro * accumulation * replicas_of(engine)
        self.typed_batch = {
            "train_batch_size": train,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
        }
        return micro

    def _note_adam(self, engine: Any) -> None:
        """Keeps whether torch's Adam is fused, the code's or that of `torch_adam` in the configuration."""
        optimizer = getattr(engine, "basic_optimizer", None)
        if f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _ADAMS:
            own = bool(getattr(optimizer, "defaults", {}).get("fused"))
            self.turnable[FUSED] = [own, not own]
            if optimizer not in fused_adam.of_the_trainer:
                self.forget_options([OPTIMIZER_OPTION])
        elif getattr(engine, "client_optimizer", None) is None:
            self.not_turnable[FUSED] = "DeepSpeed makes the optimizer, and optimizer.params.torch_adam is not true"
        else:
            self.not_turnable[FUSED] = "the code makes no Adam of torch's"

    def note_devices(self, assignment: str) -> None:
        """Keeps the first assignment by which the code names devices."""
        self.devices_in_code = self.devices_in_code or assignment

    def note_resumed(self, ds_config: Any) -> None:
        """Keeps the ZeRO stage of a checkpoint that the program resumes from, if the checkpoint says it.

        Args:
            ds_config: that the checkpoint was written with. None if the checkpoint has none.
        """
        zero = ds_config.get("zero_optimization") if isinstance(ds_config, Mapping) else None
        stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
        if isinstance(stage, int):
            self.resumed_stage = stage

    def forget_options(self, names: Iterable[str]) -> None:
        """Forgets options of the Trainer that have no effect, because the code makes the object in its place."""
        self.trainer_options = [name for name in self.trainer_options if name not in set(names)]

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
