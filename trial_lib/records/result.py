"""How a trial ended, and what it measured."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from zerotune.trial_lib.deepspeed_config.layout import ModelShape
from zerotune.trial_lib.deepspeed_config.overrides import BatchSizes
from zerotune.trial_lib.messages.measurement import Arrival, TracedStep
from zerotune.trial_lib.messages.orders import Import
from zerotune.trial_lib.records.candidate import FrozenRecord, NameOf, Purpose, Seconds
from zerotune.trial_lib.records.units import quantity


class Outcome(str, Enum):
    """How a trial ended. A failed trial is a result like any other and never ends a search. A candidate that runs out
    of memory does so at every larger micro-batch size as well. The same holds for running out of data, which are the
    same for all settings. `OUT_OF_HOST_MEMORY` says nothing about the device's memory. A CPU slot has only one memory,
    so the outcome there is `OUT_OF_MEMORY`.
    """

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    OUT_OF_DATA = "out_of_data"
    INVALID = "invalid"
    DIVERGED = "diverged"
    TOO_SLOW = "too_slow"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    CANCELLED = "cancelled"


class ModelProfile(FrozenRecord):
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
    uncounted: list[str] = Field(default_factory=list)  # operators and functions of unknown work, not in it
    linear_params: int = 0  # parameters of the linear layers, which tensor parallelism divides
    expert_params: int = 0  # parameters of the experts of DeepSpeed's mixture
    expert_ranks: int = 1  # ranks that these experts were divided over
    head_counts: list[int] = Field(default_factory=list)  # attention and key-value heads, if the model says so
    expert_counts: list[int] = Field(default_factory=list)  # of the layers of DeepSpeed's mixture, each once
    layer_count: int = 0  # layers that the stages of a pipeline share. 0 for any other model.
    # Mean bytes of a parameter as the code makes it. None if unknown, or if the DeepSpeed configuration decides it
    # (fp16, bf16).
    bytes_per_param: int | None = None

    @property
    def shape(self) -> ModelShape:
        return ModelShape(tuple(self.head_counts), self.layer_count, tuple(self.expert_counts))


class Loading(FrozenRecord):
    """A data loader of torch's in the program as typed."""

    share: float  # of a step's time that the code waits for batches, on the rank that waits longest
    num_workers: int  # its workers
    prefetch_factor: int | None = None  # batches that each worker prepares. None without workers.
    pin_memory: bool = False  # whether it copies batches to pinned memory
    cores: int = 1  # that each rank may use
    refusal: str = ""  # why another number of workers is not tried, as a clause. Empty if it may be.
    draws: bool = False  # whether its data set draws random numbers in the rank
    made_at: str = ""  # the line that makes it (`file:line`). Empty if unknown.
    by_trainer: bool = False  # whether Hugging Face's Trainer makes it


class ProgramProfile(FrozenRecord):
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
    fixed_batch: str = ""  # why every trial has the typed micro-batch size, with the remedy; empty if it varies
    divided_among: int = 1  # ranks that divide a batch of the size that is typed, as with Accelerate's `split_batches`
    batch: dict[str, int] = Field(default_factory=dict)  # batch keys that the program decides if they are "auto"
    arg_mappings: dict[str, str] = Field(default_factory=dict)  # its command line's flags for batch keys
    # Samples that the training's data loader gives a rank before it begins anew. None if they cannot be counted, or if
    # they change with the micro-batch size.
    samples_per_epoch: int | None = None
    # The most tokens of a sample in the first batches of its data. None if the batches show no tokens, or if all
    # samples have the same number.
    longest_sequence: int | None = None
    shortest_sequence: int | None = None  # the fewest tokens of a sample there
    is_stretchable: bool = False  # whether it trained on a batch stretched to the longest sequence, as trials may
    reads_activation_checkpointing: bool = False  # whether the code hands the configuration to it
    optimizer: str = ""  # the class that the code makes, as `optimizers` names it; empty if it makes none
    by_accelerate: bool = False  # whether Accelerate hands that optimizer to DeepSpeed
    by_lightning: bool = False  # whether Lightning's `DeepSpeedStrategy` makes the engine
    partitions_its_model: bool = False  # whether the code makes its model within `deepspeed.zero.Init`
    has_experts: bool = False  # whether the model has layers of a mixture of experts that DeepSpeed knows of
    by_autoep: bool = False  # whether AutoEP has made them of the model's own, and they are not `deepspeed.moe`
    repeats_backward: bool = False  # whether the code itself accumulates, by several backward calls for a step
    compiles_engine: bool = False  # whether the code calls `engine.compile()`
    steps_elsewhere: int = 0  # optimizer steps that engines other than the measured one have taken
    options: dict[str, int] = Field(default_factory=dict)  # the integers that the program read as typed, by name
    # The values of the options that the search varies, as the program's own parser read them when it ran as typed. An
    # option that was not typed has its default.
    switches: dict[str, bool | int | float | str] = Field(default_factory=dict)
    # Options that the search varies and that the program's own parser would refuse, or a value of them, each with the
    # reason as a clause
    refused_options: dict[str, str] = Field(default_factory=dict)
    hands_over_two_configs: bool = False  # one in the `args` of `deepspeed.initialize` and another as `config`
    # The ZeRO stage of a checkpoint of DeepSpeed's that the code resumes from. None if it resumes from none, from a
    # universal one, or from one that does not say.
    resumed_stage: int | None = None
    devices_in_code: str = ""  # how the code names devices, such as `CUDA_VISIBLE_DEVICES=0`; mostly empty
    # The engine's values for settings that may be "auto" (fp16, bf16, amp, the reduce bucket), as a part of a
    # configuration. Empty if unknown.
    settled: dict[str, Any] = Field(default_factory=dict)
    formats: list[str] = Field(default_factory=list)  # number formats, such as `bfloat16` or `tf32`
    loading: Loading | None = None  # the data loader that the code trains from. None if it reads no loader of torch's.
    turnable: dict[str, list[Any]] = Field(default_factory=dict)  # by switch; the program's own value is first
    not_turnable: dict[str, str] = Field(default_factory=dict)  # the other such switches, each with the reason
    # The options of the Trainer's command line that set such switches. One is left out if the code makes the loader or
    # the optimizer in the Trainer's place.
    trainer_options: list[str] = Field(default_factory=list)

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


class Memory(FrozenRecord):
    """Bytes, one value a rank, in rank order. What CUDA's allocator counts is empty on a CPU."""

    # The most in use at any moment. On CUDA that is allocated memory. On a CPU it is VmHWM without pages of files.
    peak: list[int] = Field(default_factory=list)
    after_initialize: list[int] = Field(default_factory=list)  # in use when `deepspeed.initialize` had returned
    # The most in use from then on, if it can be distinguished from the peak of initialisation. Empty on a CPU.
    steps_peak: list[int] = Field(default_factory=list)
    peak_reserved: list[int] = Field(default_factory=list)  # the most that CUDA's allocator held from then on
    allocator_retries: list[int] = Field(default_factory=list)  # how often it freed its cache to try again
    counted_retries: list[int] = Field(default_factory=list)  # how often it did in the counted steps
    # Free memory when that allocator held most. It assumes that other memory (CUDA's own, NCCL's buffers) was as large
    # then as at the end. Empty on a CPU.
    least_free: list[int] = Field(default_factory=list)
    available: list[int] = Field(default_factory=list)  # left for the steps then; empty without a budget

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


class Neighbour(FrozenRecord):
    """A foreign process that computed on a trial's device."""

    pid: int  # its process id, as the driver sees it
    name: str = ""  # of its program. Empty if it cannot be read.
    memory: int | None = None  # bytes of the device that it had. None if they cannot be read.


class TrialDevice(FrozenRecord):
    """One device of a trial, and its state during the trial. Values that cannot be read are None, or empty."""

    device: str  # a GPU's UUID, or the number of a core
    model: str = ""  # the GPU's product name
    clock: float | None = None  # median clock of its multiprocessors while it worked, in MHz
    power_limit: float | None = None  # the power that it may take, in W
    temperature: int | None = None  # the highest, in degrees Celsius
    held_down: list[str] = Field(default_factory=list)  # the reasons that lowered its clock at any time
    company: list[Neighbour] = Field(default_factory=list)  # the other processes that computed on it


class WaitedForSlots(FrozenRecord):
    """A trial's wait for slots of its host."""

    seconds: float  # from its arrival to its slots
    place: int  # its first place among those that waited for the same slots, from 1
    holders: list[str] = Field(default_factory=list)  # who had slots that it could have run on, and since when


class SwapDisk(FrozenRecord):
    """A disk to which arms may swap."""

    paths: list[str]  # each `nvme_path` on it, as the configuration has it
    free: int  # bytes free when the profile trial had ended


class TrialResult(FrozenRecord):
    """The complete record of one trial."""

    trial_id: str  # the study's id and the trial's number; unique over all studies
    number: int  # the trial's number in its study
    purpose: Purpose  # why it ran
    name: str = ""  # the name of its candidate in the study, such as `z2-mbs16`. Empty in records of earlier versions.
    config_hash: str  # names the complete DeepSpeed configuration that ran
    outcome: Outcome  # how it ended
    reason: str = ""  # one sentence that a person can act on. Empty for a completed trial.
    failed_rank: int | None = None  # the one that failed first; None if none did, or in older records
    metrics: dict[str, float] = Field(default_factory=dict)  # by name, as `measure` documents; empty if not measured
    step_times: list[float] = Field(default_factory=list)  # seconds of each counted optimizer step, on the slowest rank
    # The value that each of the first optimizer steps minimised, from step 1 on. That is mostly the mean loss over
    # micro-batches and ranks. Empty if the code shows none.
    losses: list[float] = Field(default_factory=list)
    skipped_steps: list[int] = Field(default_factory=list)  # those that changed no weight (fp16's loss scaling)
    initial_weights: list[float] = Field(default_factory=list)  # two sums over some parameters, if known
    from_outside: bool = False  # whether it was killed from outside, which says nothing about the candidate
    elsewhere: bool = False  # whether its ranks came to another kind of device, which says nothing either
    swept: bool = False  # whether the ranks had measured other micro-batch sizes before this one
    micro_batch_arrived: int | None = None  # samples that a rank's forward pass really received. None if none did.
    # Tokens in a sample of the longest micro-batch that a rank trained on. The peak includes its memory. None if the
    # inputs show no tokens.
    longest_sequence: int | None = None
    note: str = ""  # one sentence about the limits of the measurement. Mostly empty.
    memory: Memory = Memory()  # peak and the like, by rank
    profile: ModelProfile | None = None  # the findings of a profile trial about the model and the device
    program: ProgramProfile | None = None  # its findings about the program
    # Seconds that each part of the trial took, in order (`start`, `import`, `initialize`, `steps`, `end`)
    phases: dict[str, Seconds] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)  # paths of the ranks' logs, in rank order
    # Modules that rank 0 imported from outside the model directory, and the variables that the program set before (only
    # in a profile trial)
    imported: list[Import] = Field(default_factory=list)
    # How ZeroTune protected the program's files: `layered`, or `intercepted` in Python (`launch.trial_files`). Empty if
    # no rank has measured anything.
    files: str = ""
    trained_on: str = ""  # kind of device by PyTorch's name; empty if no rank recorded it
    host: str = ""  # name of the machine
    versions: dict[str, str] = Field(default_factory=dict)  # of python, torch, deepspeed and the device's driver
    started_at: Seconds = 0.0  # seconds since the epoch. The trial had its slots then.
    waited: WaitedForSlots | None = None  # its wait for slots before that. None if it had them at once.
    devices: list[TrialDevice] = Field(default_factory=list)  # in rank order, of one host; empty if unknown
    traced: TracedStep | None = None  # where the time of its steps goes. None if it was not to be traced.
    # Why ops of DeepSpeed that the search's arms need cannot be built, by their builders' names (only in a profile
    # trial)
    unbuildable: dict[str, str] = Field(default_factory=dict)
    # The disks to which arms may swap (only in a profile trial). Empty if they are not known, as in records of earlier
    # versions and on several hosts.
    swap_disks: list[SwapDisk] = Field(default_factory=list)

    @property
    def had_company(self) -> bool:
        return any(device.company for device in self.devices)

    @property
    def formats(self) -> tuple[str, ...]:
        return () if self.program is None else tuple(self.program.formats)


# The metrics that a search can optimise, one record each.


@dataclass(frozen=True)
class Metric:
    """A metric of a trial."""

    name: str  # as in `--metric`, the trial's record and MLflow
    unit: str  # for people
    smaller_is_better: bool = False  # the direction of the search
    # Whether the metric is the samples per second times a constant of the model. The intervals of two such metrics have
    # the same proportions.
    is_throughput: bool = False
    instead: str = ""  # the metric to go by if the model shows no figure for this one; empty if it always does

    def better(self, value: float, than: float) -> bool:
        return value < than if self.smaller_is_better else value > than

    def shown(self, value: float | None) -> str:
        return "" if value is None else quantity(value, self.unit)


SEARCH_METRICS = {
    metric.name: metric
    for metric in (
        Metric("FLOPS_per_gpu", "FLOP/s", is_throughput=True, instead="throughput"),
        Metric("throughput", "samples/s", is_throughput=True),
        Metric("forward", "s", smaller_is_better=True),
        Metric("backward", "s", smaller_is_better=True),
        Metric("latency", "s", smaller_is_better=True),
    )
}

MetricName = Annotated[str, NameOf("metric", SEARCH_METRICS)]


# The common part of the reasons of trials that ended the same way.

# Paths and numbers differ between such reasons.
_PATH = re.compile(r"(?<![\w.])/[^\s:;,'\")]+")
_NUMBER = re.compile(r"\d[\d,.]*")
_LOG = re.compile(r"\s*Log: .*")


def as_sentence(reason: str) -> str:
    """Returns a reason with a full stop, so that another sentence can follow. No reason stays none.

    Example:
        >>> as_sentence("The program raised KeyError: 'labels'"), as_sentence("Did it end?")
        ("The program raised KeyError: 'labels'.", 'Did it end?')
    """
    said = reason.rstrip()
    return said if not said or said.endswith((".", "!", "?", ":")) else f"{said}."


def cause_of(reason: str) -> str:
    """Returns the reason of a failed trial without its paths and numbers.

    Example:
        >>> cause_of("Rank 1 left no result. Log: /tmp/trials/0003/rank1.log")
        'Rank # left no result. Log: PATH'
    """
    return _NUMBER.sub("#", _PATH.sub("PATH", reason))


def without_log(reason: str) -> str:
    """Returns the reason of a failed trial without the path of its log."""
    return _LOG.sub("", reason)
