"""How a trial ended, and what it measured."""

from enum import Enum
from typing import Any

from pydantic import Field

from trial_lib.deepspeed_config.batch import BatchSizes
from trial_lib.records.candidate import Purpose
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.wire.arrival import Arrival


class Outcome(str, Enum):
    """How a trial ended. A failed trial is a result like any other: it never ends a search.

    What is out of memory, or out of data, is so at every larger micro-batch size; data are the same for all settings.
    What is out of the host's memory says nothing of the device's; a CPU's slot has one memory, and is out of that.
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
    """What the profile trial found out about the model and the device.

    Attributes:
        num_params: parameters of the whole model.
        trainable_num_params: those that the optimizer may change.
        activation_mem_per_gpu: bytes that one sample's forward pass keeps for the backward pass, on one device.
        gpu_mem: bytes of memory that the model may use on a slot: the device's; on a CPU the slot's budget, less what
            the process takes for itself before there is an engine.
        host_mem: bytes that the host has free for each of its ranks beside what they have taken, on CUDA: for states
            that are offloaded. 0 on a CPU, whose slots have one memory, and where nobody knows.
        data_parallel_size: model replicas that the engine runs.
        pipeline_parallel: whether the model is a pipeline.
        flops_per_sample: FLOPs of forward and backward of one sample, over all devices of one replica; 0 where they
            could not be counted.
        uncounted: operators and functions of others that took part, by their names: nobody knows what they do, and it
            is not among those FLOPs.
        bytes_per_param: of one parameter as the code has made it, in the mean; None where the DeepSpeed configuration
            decides that (fp16, bf16), or nobody knows.
    """

    num_params: int
    trainable_num_params: int
    activation_mem_per_gpu: int
    gpu_mem: int
    host_mem: int = 0
    data_parallel_size: int
    pipeline_parallel: bool = False
    flops_per_sample: float
    uncounted: list[str] = Field(default_factory=list)
    bytes_per_param: int | None = None


class ProgramProfile(FrozenRecord):
    """What the profile trial found out about the user's program.

    Attributes:
        ds_config: the DeepSpeed configuration that the code handed over, before anything was merged into it; None
            where it handed over none.
        typed_batch: the batch of the engine that trains when the program runs as it was typed; None where no run of it
            has come to an engine.
        rows_per_sample: rows of a batch that one sample takes, as the program runs as typed (two in a preference
            trainer); 0 where rows do not show samples, because a row holds several of them.
        batch_dimension: which dimension of a batch's first tensor has the rows.
        other_rows_per_sample: what `rows_per_sample` is if the other one has them; see `Arrival`.
        micro_batches_per_step: that came in its first optimizer step; None where it took none.
        tokens_per_micro_batch: tokens in its first micro-batch; None where the batches show none.
        batch_varies: whether the number of samples differs from micro-batch to micro-batch.
        batch: the batch keys that the program itself decides where that configuration leaves them open ("auto").
        arg_mappings: the flags of its command line that set batch keys, where it was seen to read them.
        longest_sequence: the most tokens that a sample had in the first batches of its data; None where the batches
            show no tokens, or all have as many.
        shortest_sequence: the fewest.
        is_stretchable: whether the program has trained on a batch that was made as long as the longest, so that trials
            can be measured on such a one.
        reads_activation_checkpointing: whether the program has DeepSpeed's activation checkpointing configured by the
            configuration, so that settings of it have an effect.
        optimizer: the class of the optimizer that the code makes, as `optimizers` names it; empty where it makes none.
        by_accelerate: whether Accelerate hands that optimizer to DeepSpeed.
        partitions_its_model: whether the code makes its model within `deepspeed.zero.Init`.
        has_experts: whether the model has layers of DeepSpeed's mixture of experts (`deepspeed.moe`).
        repeats_backward: whether the code calls backward more than once for one step of an engine that ends an
            accumulation, and so adds gradients up by itself.
        steps_elsewhere: optimizer steps that engines other than the measured one have taken.
        options: the whole numbers among the options that the program has read, by name, as it runs as typed.
        hands_over_two_configs: whether the code hands `deepspeed.initialize` one in its `args` and another as `config`.
        settled: what the engine has where a configuration may say "auto" (fp16, bf16, amp, the reduce bucket), as a
            part of a configuration; empty where nobody knows.
        formats: of the numbers that the model is kept in and computes with, such as `bfloat16` or `tf32`, whoever has
            decided on them.
    """

    ds_config: dict[str, Any] | None = None
    typed_batch: BatchSizes | None = None
    rows_per_sample: int = 1
    batch_dimension: int = 0
    other_rows_per_sample: int = 1
    micro_batches_per_step: int | None = None
    tokens_per_micro_batch: int | None = None
    batch_varies: bool = False
    batch: dict[str, int] = Field(default_factory=dict)
    arg_mappings: dict[str, str] = Field(default_factory=dict)
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
    options: dict[str, int] = Field(default_factory=dict)
    hands_over_two_configs: bool = False
    settled: dict[str, Any] = Field(default_factory=dict)
    formats: list[str] = Field(default_factory=list)

    @property
    def arrival(self) -> Arrival:
        """How the samples that a trial asks for show in the batches that arrive."""
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
    """Bytes, one value a rank, in rank order.

    Attributes:
        peak: the most that was in use at any moment: allocated on CUDA, VmHWM without pages of files
            on a CPU.
        after_initialize: in use when `deepspeed.initialize` had returned.
        steps_peak: the most that was in use from then on, where it can be told from what initialisation took for a
            moment; empty on a CPU.
        peak_reserved: the most that CUDA's caching allocator held from then on; empty on a CPU.
        allocator_retries: how often CUDA's allocator had to free its cache and try again; empty on a CPU.
        counted_retries: how often it had to in the counted steps; empty on a CPU.
        least_free: what nobody had when that allocator held most, if what others have (CUDA's own, NCCL's buffers) was
            then what it is at the end; empty on a CPU.
        available: what the slot still had for the steps when `deepspeed.initialize` had returned; empty where a CPU
            slot has no budget.
    """

    peak: list[int] = Field(default_factory=list)
    after_initialize: list[int] = Field(default_factory=list)
    steps_peak: list[int] = Field(default_factory=list)
    peak_reserved: list[int] = Field(default_factory=list)
    allocator_retries: list[int] = Field(default_factory=list)
    counted_retries: list[int] = Field(default_factory=list)
    least_free: list[int] = Field(default_factory=list)
    available: list[int] = Field(default_factory=list)

    @property
    def above_initialize(self) -> list[int]:
        """What the steps took beside what initialisation had left in use."""
        pairs = zip(self.steps_peak or self.peak, self.after_initialize, strict=False)
        return [peak - after for peak, after in pairs]

    @property
    def was_short(self) -> bool:
        """Whether memory was short for the counted steps: an allocator had to make room in some of them."""
        return any(self.counted_retries)

    @property
    def unusable(self) -> int:
        """What was neither free nor a tensor's when an allocator held most, on the rank with most; 0 on a CPU."""
        ranks = zip(self.available, self.above_initialize, self.least_free, strict=False)
        return max((available - above - free for available, above, free in ranks), default=0)


class Neighbour(FrozenRecord):
    """A process of somebody else's that computed on a trial's device.

    Attributes:
        pid: as the driver numbers it.
        name: of its program; empty where nobody may know.
        memory: bytes of the device that it had; None where nobody may know.
    """

    pid: int
    name: str = ""
    memory: int | None = None


class TrialDevice(FrozenRecord):
    """One device of a trial, and how it was meanwhile. What nobody can tell is None, or empty.

    Attributes:
        device: a GPU's UUID, the number of a core.
        model: what the GPU is.
        clock: of its multiprocessors while it worked, in MHz: the median.
        power_limit: what it might take, in W.
        temperature: the highest, in degrees Celsius.
        held_down: why its clock was lower than it could be, at any time.
        company: who else computed on it.
    """

    device: str
    model: str = ""
    clock: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    held_down: list[str] = Field(default_factory=list)
    company: list[Neighbour] = Field(default_factory=list)


class TrialResult(FrozenRecord):
    """One trial's record, complete: what ran, how it ended, what it measured.

    Attributes:
        trial_id: unique over all studies: the study's id and the trial's number.
        number: the trial's number in its study.
        purpose: why it ran.
        name: the name of its candidate in the study, such as `z2-mbs16`. Empty in records of earlier versions.
        config_hash: names the complete DeepSpeed configuration that ran.
        outcome: how it ended.
        reason: one sentence that a person can act on; empty for a completed trial.
        failed_rank: the rank that failed first; None if none failed, or in a record of an older version.
        metrics: by name; `measure` documents each. Empty unless steps were measured.
        step_times: seconds of each counted optimizer step, on the slowest rank.
        losses: what each of the first optimizer steps has made smaller, from step 1 on: mostly the mean loss over
            micro-batches and ranks; empty where the code shows none.
        skipped_steps: which of these steps have changed no weight, from 1 on: fp16's loss scaling skips some.
        initial_weights: two sums over some elements of all parameters before the first step; empty where unknown.
        from_outside: whether somebody killed its ranks, their guard or their host, which says nothing of the candidate.
        elsewhere: whether they came to another kind of device than their slots are, which says nothing of it either.
        swept: whether the ranks had measured other micro-batch sizes before this one; else they were fresh.
        micro_batch_arrived: samples that a rank's forward pass really received; None where none did.
        longest_sequence: tokens in a sample of the longest micro-batch that a rank trained on, whose memory is in the
            peak; None where the inputs show no tokens.
        note: one sentence about what the measurement leaves out; mostly empty.
        memory: peak and the like, by rank.
        profile: what a profile trial found out about the model and the device.
        program: what it found out about the program.
        phases: seconds that each part of the trial took, in order (`start`, `import`, `initialize`, `steps`, `end`).
        logs: paths of the ranks' logs, in rank order.
        imported: modules that rank 0 had imported from outside the model directory (a profile trial's only).
        files: how the program's files were left alone: `layered`, or `intercepted` in Python (`launch.trial_files`);
            empty where no rank has measured anything.
        trained_on: the kind of device that the ranks trained on, as PyTorch calls it; empty where none has said so.
        host: name of the machine.
        versions: of python, torch, deepspeed and the device's driver.
        started_at: seconds since the epoch.
        devices: those that it had, in rank order, of one host; empty where nobody had any.
        unbuildable: why ops of DeepSpeed's that the search's arms need cannot be built, by their builders' names (a
            profile trial's only).
    """

    trial_id: str
    number: int
    purpose: Purpose
    name: str = ""
    config_hash: str
    outcome: Outcome
    reason: str = ""
    failed_rank: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    step_times: list[float] = Field(default_factory=list)
    losses: list[float] = Field(default_factory=list)
    skipped_steps: list[int] = Field(default_factory=list)
    initial_weights: list[float] = Field(default_factory=list)
    from_outside: bool = False
    elsewhere: bool = False
    swept: bool = False
    micro_batch_arrived: int | None = None
    longest_sequence: int | None = None
    note: str = ""
    memory: Memory = Memory()
    profile: ModelProfile | None = None
    program: ProgramProfile | None = None
    phases: dict[str, float] = Field(default_factory=dict)
    logs: list[str] = Field(default_factory=list)
    imported: list[str] = Field(default_factory=list)
    files: str = ""
    trained_on: str = ""
    host: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: float = 0.0
    devices: list[TrialDevice] = Field(default_factory=list)
    unbuildable: dict[str, str] = Field(default_factory=dict)

    @property
    def had_company(self) -> bool:
        """Whether somebody else computed on its devices meanwhile."""
        return any(device.company for device in self.devices)

    @property
    def formats(self) -> tuple[str, ...]:
        """Of the numbers that the program computes with, as a profile trial has found them; none where nobody knows."""
        return () if self.program is None else tuple(self.program.formats)
