"""What a rank measures and finds: the records that go up to the driver, the same on both sides.

A rank makes them, and has no pydantic. The driver validates them by a `TypeAdapter`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

# The boot of a host, seconds since then, and seconds since the epoch, which other hosts have as well.
HostMoment = Sequence[str | float]

Import = str | dict[str, str | None]
"""A module; a statement that imports; or environment variables that the program sets before the next ones, where None
removes one."""


class ExactRecord:
    """A dataclass that pydantic reads without unknown keys."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}


# How samples show in the batches that arrive.


@dataclass(frozen=True)
class Arrival:
    """The relation between samples and batches, as the program as typed has shown it."""

    # Rows of one sample (two in a preference trainer). 0 if a row holds several samples, as in sequences that are
    # packed without padding.
    rows_per_sample: int = 1
    # Whether the number of samples differs from micro-batch to micro-batch. Each row is then a sample.
    varies: bool = False
    typed_micro_batch: int = 1  # the micro-batch size of the program as typed
    typed_tokens: int | None = None  # tokens in its first micro-batch; None if the batches show none
    # The dimension of a batch's first tensor that has the rows: 0, or 1 for `(sequence, batch, ...)`
    dimension: int = 0
    # `rows_per_sample` if the other of these two dimensions has the rows; 0 if it cannot. A tensor of one size may be
    # read both ways. The right reading is the one that follows another size.
    other_rows_per_sample: int = 1
    typed_accumulation: int = 1  # the accumulation of the engine of the program as typed
    typed_micro_batches: int | None = None  # micro-batches of its first optimizer step; None if unknown

    @classmethod
    def of_typed(cls, micro_batch: int, sizes: Sequence[int], tokens: int | None) -> "Arrival":
        """`sizes` are of the first tensor, in the one or two dimensions that may have the rows. None: no `tokens`."""
        first, second = (*sizes, 0)[:2]
        rows_per_sample = first // micro_batch if first % micro_batch == 0 else 1
        if first == 1 < micro_batch and tokens is not None:
            rows_per_sample = 0
        other = second // micro_batch if second % micro_batch == 0 and rows_per_sample else 0
        found = cls(rows_per_sample, typed_micro_batch=micro_batch, typed_tokens=tokens, other_rows_per_sample=other)
        if first == micro_batch != second:
            return replace(found, other_rows_per_sample=0)
        if other and second == micro_batch != first:
            return replace(found._turned(), other_rows_per_sample=0 if first % micro_batch else rows_per_sample)
        return found

    def at(self, asked: int, sizes: Sequence[int], tokens: int | None) -> "Arrival":
        """The relation that a trial's first micro-batch shows: if only the other dimension follows, it has the rows."""
        if self.varies or not self.other_rows_per_sample or len(sizes) < 2:
            return self
        readings = (self, self._turned())
        found = [each for each in readings if each.follows(asked, sizes[each.dimension], tokens)]
        return replace(found[0], other_rows_per_sample=0) if found else self

    def _turned(self) -> "Arrival":
        return replace(
            self,
            dimension=1 - self.dimension,
            rows_per_sample=self.other_rows_per_sample,
            other_rows_per_sample=self.rows_per_sample,
        )

    def rows(self, asked: int) -> int:
        return asked * max(1, self.rows_per_sample)

    def samples(self, rows: float, asked: float) -> float:
        """Returns the samples in some micro-batches of so many rows together; `asked` is the sum of their sizes."""
        if self.varies:
            return rows
        return rows / self.rows_per_sample if self.rows_per_sample else asked

    def follows(self, asked: int, rows: int, tokens: int | None) -> bool:
        """Whether a micro-batch has the requested size; True if the batch does not show it. `tokens` are in `rows`."""
        if self.varies:
            return True
        if self.rows_per_sample:
            return rows == self.rows(asked)
        if tokens is None or not self.typed_tokens:
            return True
        # Lengths differ from sample to sample.
        return _follows(tokens, self.typed_tokens, asked / self.typed_micro_batch)

    def accumulates(self, asked: int, micro_batches: int) -> bool:
        """Whether an optimizer step has followed the requested accumulation; True if it does not show."""
        if not self.typed_micro_batches or not micro_batches:
            return True
        # At the end of its data a program may step early.
        return _follows(micro_batches, self.typed_micro_batches, asked / self.typed_accumulation)


def _follows(found: int, typed: int, growth: float) -> bool:
    if growth == 1:
        return True
    expected = typed * growth
    apart = max(found / expected, expected / found)
    return apart < max(found / typed, typed / found) or apart < 2**0.5


# Where the time of an optimizer step goes: the parts of a step that was traced.

TRACE = "trace"  # the phase of a trial in which its steps are traced
STEP_PARTS = (
    *("compute", "gathering", "reducing", "exchanging", "update", "host_update", "transfers", "disk", "data"),
    *("generation", "rewards", "launches", "other"),
)
"""The parts of a step. A plan names its parts alike; the last but `launches` are known only to a trace.

`compute`: forward and backward passes. `gathering`: waiting for parameters. `reducing`: waiting for sums of gradients.
`exchanging`: waiting for tensors of other ranks. `update`: the optimizer on the device. `host_update`: the
optimizer on the host. `transfers`: waiting for copies between host and device. `disk`: waiting for NVMe drives. `data`:
waiting for a batch of a data loader. `generation`, `rewards`: the model generates texts that it trains on, and they are
judged. `launches`: the device waits for the host to issue work. `other`: the program does something else.
"""


@dataclass(frozen=True, kw_only=True)
class TracedStep(ExactRecord):
    """An optimizer step that was traced, as the mean over ranks and steps."""

    seconds: float = 0.0  # of the step, with the profiler's own cost
    # Seconds by the names of `STEP_PARTS`. They add up to `seconds`.
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0  # how many were traced. 0 if none could be.
    spent: float = 0.0  # seconds that the tracing took, its steps included
    failure: str = ""  # why nothing was traced, in a sentence. Empty if it was.

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of the step, in the order of `STEP_PARTS`; empty without a trace."""
        if self.seconds <= 0:
            return {}
        return {part: self.parts[part] / self.seconds for part in STEP_PARTS if self.parts.get(part)}


# The findings of a profile trial.


@dataclass(frozen=True)
class BatchSizes:
    """The samples of one optimizer step, and their division."""

    train_batch_size: int  # samples in one optimizer step, over all replicas
    micro_batch_size: int  # samples of a rank in one forward pass
    gradient_accumulation_steps: int  # micro-batches in one optimizer step


@dataclass(frozen=True, kw_only=True)
class ModelProfile(ExactRecord):
    """The findings of the profile trial about the model and the device."""

    num_params: int  # parameters of the whole model, with all experts
    trainable_num_params: int  # parameters that the optimizer may change
    activation_mem_per_gpu: int  # bytes that one sample's forward pass keeps for the backward pass, on one device
    # Bytes that the model may use on a slot. On a GPU that is the device's memory. On a CPU it is the slot's budget,
    # less the bytes that the process takes before it has an engine.
    gpu_mem: int
    # Bytes that the host has free for each of its ranks, beside those that they have taken. Offloaded states go there.
    # 0 if unknown, and on a CPU, whose slots have only one memory.
    host_mem: int = 0
    data_parallel_size: int  # model replicas that the engine runs
    pipeline_parallel: bool = False  # whether the model is a pipeline
    flops_per_sample: float  # of forward and backward, over a replica's devices; 0 if they cannot be counted
    uncounted: list[str] = field(default_factory=list)  # operators and functions of unknown work, not in it
    linear_params: int = 0  # parameters of the linear layers, which tensor parallelism divides
    expert_params: int = 0  # parameters of the experts of DeepSpeed's mixture
    expert_ranks: int = 1  # ranks that these experts were divided over
    head_counts: list[int] = field(default_factory=list)  # attention and key-value heads, if the model says so
    expert_counts: list[int] = field(default_factory=list)  # of the layers of DeepSpeed's mixture, each once
    layer_count: int = 0  # layers that the stages of a pipeline share. 0 for any other model.
    # Mean bytes of a parameter as the code makes it. None if unknown, or if the DeepSpeed configuration decides it
    # (fp16, bf16).
    bytes_per_param: int | None = None


@dataclass(frozen=True, kw_only=True)
class Loading:
    """A data loader of torch's in the program as typed."""

    __pydantic_config__: ClassVar[Any] = {"extra": "ignore"}  # records of earlier versions have more
    share: float  # of a step's time that the code waits for batches, on the rank that waits longest
    num_workers: int  # its workers
    prefetch_factor: int | None = None  # batches that each worker prepares. None without workers.
    pin_memory: bool = False  # whether it copies batches to pinned memory
    cores: int = 1  # that each rank may use
    refusal: str = ""  # why another number of workers is not tried, as a clause. Empty if it may be.
    made_at: str = ""  # the line that makes it (`file:line`). Empty if unknown.
    by_trainer: bool = False  # whether Hugging Face's Trainer makes it


@dataclass(frozen=True, kw_only=True)
class AcrossRows(ExactRecord):
    """Whether the rows of a micro-batch depend on each other, by a test on one micro-batch of the program as typed."""

    # `layers` if a row's outputs depend on other rows, `loss` if only the loss does, and `unequal` if that is a mean
    # over numbers that differ from row to row. Empty if none was found.
    kind: str = ""
    names: list[str] = field(default_factory=list)  # classes of such layers, if they are known
    undecided: str = ""  # why the test is not complete, as a clause. Empty if it is.
    # Whether the code computes its loss from the engine's outputs. A mean over unequal numbers would not show there.
    is_outside: bool = False
    seconds: float = 0.0  # that the test has taken

    @property
    def why(self) -> str:
        """Why another micro-batch is another training, in a sentence. Empty if nothing is known that makes it one."""
        if self.kind == "layers":
            subject = " and ".join(self.names) or "A layer"
            verb = "compute" if len(self.names) > 1 else "computes"
            return f"{subject} {verb} over the samples of a micro-batch, so another micro-batch is another training."
        if self.kind == "loss":
            return "The loss depends on several samples of a micro-batch at once, so another one is another training."
        return ""


@dataclass(frozen=True, kw_only=True)
class ProgramProfile(ExactRecord):
    """The findings of the profile trial about the user's program."""

    # The DeepSpeed configuration that the code handed over, before anything was merged into it. None if it handed over
    # none.
    ds_config: dict[str, Any] | None = None
    typed_batch: BatchSizes | None = None  # of the engine, as the program is typed; None if it made no engine
    # Rows of a batch that one sample takes when the program runs as typed (two in a preference trainer). 0 if a row
    # holds several samples.
    rows_per_sample: int = 1
    batch_dimension: int = 0  # the dimension of a batch's first tensor that has the rows
    other_rows_per_sample: int = 1  # `rows_per_sample` if the other dimension has the rows; see `Arrival`
    micro_batches_per_step: int | None = None  # micro-batches in its first optimizer step. None if it took no step.
    tokens_per_micro_batch: int | None = None  # tokens in its first micro-batch. None if the batches show no tokens.
    batch_varies: bool = False  # whether the number of samples differs from micro-batch to micro-batch
    across_rows: AcrossRows | None = None  # None if no test has run
    fixed_batch: str = ""  # why every trial has the typed micro-batch size, with the remedy; empty if it varies
    divided_among: int = 1  # ranks that divide a batch of the size that is typed, as with Accelerate's `split_batches`
    batch: dict[str, int] = field(default_factory=dict)  # batch keys that the program decides if they are "auto"
    arg_mappings: dict[str, str] = field(default_factory=dict)  # its command line's flags for batch keys
    # Samples that the training's data loader gives a rank before it begins anew. None if they cannot be counted, or if
    # they change with the micro-batch size.
    samples_per_epoch: int | None = None
    whole_steps: int | None = None  # optimizer steps of the whole training, by its Trainer
    whole_epochs: float | None = None  # its epochs, if the Trainer counts these
    # Numbers of a decoder by the names of `DecoderShape`, if `model.config` has them. Empty for other models.
    decoder: dict[str, int] = field(default_factory=dict)
    # The most tokens of a sample in the first batches of its data. None if the batches show no tokens, or if all
    # samples have the same number.
    longest_sequence: int | None = None
    shortest_sequence: int | None = None  # the fewest tokens of a sample there
    is_stretchable: bool = False  # whether it trained on a batch stretched to the longest sequence, as trials may
    reads_activation_checkpointing: bool = False  # whether the code hands the configuration to it
    optimizer: str = ""  # the class that the code makes, as `optimizers` names it; empty if it makes none
    by_accelerate: bool = False  # whether Accelerate hands that optimizer to DeepSpeed
    by_lightning: bool = False  # whether Lightning's `DeepSpeedStrategy` makes the engine
    # Of the configuration that Hydra has composed: numbers, interpolations and sections of DeepSpeed's
    hydra_config: dict[str, Any] = field(default_factory=dict)
    partitions_its_model: bool = False  # whether the code makes its model within `deepspeed.zero.Init`
    has_experts: bool = False  # whether the model has layers of a mixture of experts that DeepSpeed knows of
    by_autoep: bool = False  # whether AutoEP has made them of the model's own, and they are not `deepspeed.moe`
    repeats_backward: bool = False  # whether the code itself accumulates, by several backward calls for a step
    compiles_engine: bool = False  # whether the code calls `engine.compile()`
    steps_elsewhere: int = 0  # optimizer steps that engines other than the measured one have taken
    options: dict[str, int] = field(default_factory=dict)  # the integers that the program read as typed, by name
    # The values of the options that the search varies, as the program's own parser read them when it ran as typed. An
    # option that was not typed has its default.
    switches: dict[str, bool | int | float | str] = field(default_factory=dict)
    # Options that the search varies and that the program's own parser would refuse, or a value of them, each with the
    # reason as a clause
    refused_options: dict[str, str] = field(default_factory=dict)
    hands_over_two_configs: bool = False  # one in the `args` of `deepspeed.initialize` and another as `config`
    # The ZeRO stage of a checkpoint of DeepSpeed's that the code resumes from. None if it resumes from none, from a
    # universal one, or from one that does not say.
    resumed_stage: int | None = None
    devices_in_code: str = ""  # how the code names devices, such as `CUDA_VISIBLE_DEVICES=0`; mostly empty
    # The engine's values for settings that may be "auto" (fp16, bf16, amp, the reduce bucket), as a part of a
    # configuration. Empty if unknown.
    settled: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)  # its engine's whole configuration, with DeepSpeed's defaults
    formats: list[str] = field(default_factory=list)  # number formats, such as `bfloat16` or `tf32`
    loading: Loading | None = None  # the data loader that the code trains from. None if it reads no loader of torch's.
    turnable: dict[str, list[Any]] = field(default_factory=dict)  # by switch; the program's own value is first
    not_turnable: dict[str, str] = field(default_factory=dict)  # the other such switches, each with the reason
    # The options of the Trainer's command line that set such switches. One is left out if the code makes the loader or
    # the optimizer in the Trainer's place.
    trainer_options: list[str] = field(default_factory=list)

    @property
    def arrival(self) -> Arrival:
        if self.typed_batch is None:
            return Arrival()
        return Arrival(
            rows_per_sample=self.rows_per_sample,
            varies=self.batch_varies,
            typed_micro_batch=self.typed_batch.micro_batch_size,
            typed_tokens=self.tokens_per_micro_batch,
            dimension=self.batch_dimension,
            other_rows_per_sample=self.other_rows_per_sample,
            typed_accumulation=self.typed_batch.gradient_accumulation_steps,
            typed_micro_batches=self.micro_batches_per_step,
        )


@dataclass(frozen=True, kw_only=True)
class Memory(ExactRecord):
    """Bytes, one value a rank, in rank order. What CUDA's allocator counts is empty on a CPU."""

    # The most in use at any moment. On CUDA that is allocated memory. On a CPU it is VmHWM without pages of files.
    peak: list[int] = field(default_factory=list)
    after_initialize: list[int] = field(default_factory=list)  # in use when `deepspeed.initialize` had returned
    # The most in use from then on, if it can be distinguished from the peak of initialisation. Empty on a CPU.
    steps_peak: list[int] = field(default_factory=list)
    peak_reserved: list[int] = field(default_factory=list)  # the most that CUDA's allocator held from then on
    allocator_retries: list[int] = field(default_factory=list)  # how often it freed its cache to try again
    counted_retries: list[int] = field(default_factory=list)  # how often it did in the counted steps
    # Free memory when that allocator held most. It assumes that other memory (CUDA's own, NCCL's buffers) was as large
    # then as at the end. Empty on a CPU.
    least_free: list[int] = field(default_factory=list)
    available: list[int] = field(default_factory=list)  # left for the steps then; empty without a budget

    @property
    def above_initialize(self) -> list[int]:
        """Bytes that the steps took above those in use after initialisation."""
        pairs = zip(self.steps_peak or self.peak, self.after_initialize, strict=False)
        return [peak - after for peak, after in pairs]

    @property
    def was_short(self) -> bool:
        return any(self.counted_retries)

    @property
    def unusable(self) -> int:
        """Bytes neither free nor a tensor's when an allocator held most, on the rank with most; 0 on a CPU."""
        ranks = zip(self.available, self.above_initialize, self.least_free, strict=False)
        return max((available - above - free for available, above, free in ranks), default=0)

    @classmethod
    def of_ranks(cls, ranks: Iterable["Memory"]) -> "Memory":
        every = list(ranks)
        return cls(
            **{each.name: [value for rank in every for value in getattr(rank, each.name)] for each in fields(cls)}
        )


# The record of a trial.


@dataclass(frozen=True, kw_only=True)
class WeightChange(ExactRecord):
    """The change of the weights by the first updates, by module: the same projection of it in every trial."""

    updates: int = 0  # after which it was taken
    modules: list[str] = field(default_factory=list)  # their names; a single empty one for the whole model
    sums: list[list[float]] = field(default_factory=list)  # of each module, the change's sums with random signs
    momenta: list[list[float]] = field(default_factory=list)  # of the momenta after them; empty without momentum
    is_linear: bool = False  # whether the optimizer multiplies gradients and adds them, as SGD does
    # The factor by which Adam corrected the bias of its averages in each update; empty if unknown
    corrections: list[float] = field(default_factory=list)
    seconds: float = 0.0  # that rank 0 has spent on it


@dataclass(frozen=True, kw_only=True)
class Measured(ExactRecord):
    """What a rank has measured. A trial's result has it as rank 0 has written it."""

    metrics: dict[str, float] = field(
        default_factory=dict
    )  # by name, as `CountedSteps` has them; empty if not measured
    step_times: list[float] = field(default_factory=list)  # seconds of each counted optimizer step, on the slowest rank
    # The value that each of the first optimizer steps minimised, from step 1 on. That is mostly the mean loss over
    # micro-batches and ranks. Empty if the code shows none.
    losses: list[float] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)  # those that changed no weight (fp16's loss scaling)
    initial_weights: list[float] = field(default_factory=list)  # two sums over some parameters, if known
    # The norms of the gradients of the first updates, before clipping; 0 if unknown
    gradient_norms: list[float] = field(default_factory=list)
    weight_change: WeightChange | None = None  # None if there were too few updates, or if a rank cannot reach them
    elsewhere: bool = False  # whether the rank came to another kind of device, which says nothing of the candidate
    micro_batch_arrived: int | None = None  # samples that a rank's forward pass really received. None if none did.
    # Samples of a rank that came before its first (or batches, if a batch sampler of the program's makes them). None if
    # the trial was to begin elsewhere and the program's data could not be moved, and in records of earlier versions.
    data_offset: int | None = None
    data_places: int | None = None  # how many that order has. None for a stream, and where nothing was moved.
    # Tokens in a sample of the longest micro-batch that a rank trained on. The peak includes its memory. None if the
    # inputs show no tokens.
    longest_sequence: int | None = None
    note: str = ""  # one sentence about the limits of the measurement. Mostly empty.
    memory: Memory = Memory()  # peak and the like; a rank has its own alone
    profile: ModelProfile | None = None  # the findings of a profile trial about the model and the device
    program: ProgramProfile | None = None  # its findings about the program
    # Seconds that each part of the trial took, in order (`start`, `import`, `initialize`, `steps`, `end`)
    phases: dict[str, float] = field(default_factory=dict)
    # Modules that rank 0 imported from outside the model directory, and the variables that the program set before (only
    # in a profile trial)
    imported: list[Import] = field(default_factory=list)
    # How ZeroTune protected the program's files: `layered`, or `intercepted` in Python (`launch.trial_files`). Empty if
    # no rank has measured anything.
    files: str = ""
    trained_on: str = ""  # kind of device by PyTorch's name; empty if no rank recorded it
    host: str = ""  # name of the machine
    versions: dict[str, str] = field(default_factory=dict)  # of python, torch, deepspeed and the device's driver
    traced: TracedStep | None = None  # where the time of its steps goes. None if it was not to be traced.


@dataclass(frozen=True, kw_only=True)
class Measurement(Measured):
    outcome: str  # how the trial ended, as `Outcome` (`trial_lib/records/result.py`) has it
    reason: str = ""  # why, in one sentence; empty if it is completed
    time: HostMoment = ()  # the moment of the measurement
    is_kept: bool = False  # whether the rank has kept it in case it gets no further, so that it may still become more


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The exception that ended a rank. Older records lack some fields."""

    type: str = ""  # the exception's class
    message: str = ""  # its own words
    traceback: str = ""  # as Python prints it
    in_initialize: bool = False  # whether `deepspeed.initialize` has raised it
    refusal: str = ""  # which key DeepSpeed has refused, and the remedy; empty if unknown
    ended_early: bool = False  # whether the program ended before enough steps were measured
    waits: bool = False  # whether the ranks wait for each other
    elsewhere: bool = False  # whether the rank came to another kind of device
    memory: dict[str, int] = field(default_factory=dict)  # bytes that the device had left; empty if unknown
    engine_built: bool = False  # whether the program had a DeepSpeed engine
    time: float = 0.0  # seconds since the epoch
    phases: dict[str, float] = field(default_factory=dict)  # as `Measured` has them
