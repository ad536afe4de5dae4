"""A foreseen run: its order, and its record, one rank's steps under fake tensors, event by event."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import repeat
from typing import Any, NamedTuple

from trial_lib.messages.orders import HostMoment, Import, exact_record

# The order for a foreseen run. A rank imports this module, so it needs only the standard library.


CUDA_PACKAGES = ("bitsandbytes", "liger_kernel")
"""Packages whose code a foreseen run changes while it is loaded, so that no fork server may have imported them."""

DEVICE_NAME = "NVIDIA H100 80GB"
"""The device that a program finds, unless a plan asks for another one."""

CAPABILITY = 9.0
"""Its compute capability."""

BFLOAT16_SINCE = 8.0
"""The compute capability from which matrix units take bfloat16."""


@dataclass(frozen=True, kw_only=True)
class ForeseeOrder:
    """One run to foresee: the program, and the world that it is to find.

    Attributes:
        program: `{"script": path}` or `{"module": name}`.
        local_rank_option: as `RankOrder` has it.
        arguments: the program's command line.
        model_dir: the working directory.
        scratch: a folder that replaces the user's files for everything that the program would write.
        protected_before: seconds since the epoch. The rank never changes a file of the user's that is older.
        overrides: merged into the DeepSpeed configuration of the engine that trains.
        turned: the switches that the rank turns in the program, by name.
        varied_options: the options of the program that a search varies, with the values to try.
        world: ranks of the pretended world.
        ranks_per_host: of these, the ranks on one host.
        device_bytes: memory of the pretended device, for a program that asks.
        device_name: its name, likewise.
        capability: its compute capability, likewise. Some programs choose number formats and kernels by it.
        steps: optimizer steps after which the run ends.
        result: the file for the `ForeseenRun`.
        log: the file with the rank's output.
        launched_at: the moment of its launch.
        patience_s: seconds after which the rank records where the program is, and ends.
        hidden: as `RankOrder` has it.
    """

    program: dict[str, str]
    local_rank_option: str = ""
    arguments: list[str] = field(default_factory=list)
    model_dir: str
    scratch: str
    protected_before: float
    overrides: dict[str, Any] = field(default_factory=dict)
    turned: dict[str, Any] = field(default_factory=dict)
    varied_options: dict[str, list[Any]] = field(default_factory=dict)
    world: int
    ranks_per_host: int
    device_bytes: int
    device_name: str = DEVICE_NAME
    capability: float = CAPABILITY
    steps: int
    result: str
    log: str = ""
    launched_at: HostMoment
    patience_s: float = 600.0
    hidden: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseeOrder":
        """Returns the order that `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        return exact_record(cls, plain)


# The record of a foreseen run: one rank's steps under fake tensors, event by event.


MOMENTS = ("initialize", "load", "forward", "backward", "update", "between")
"""The parts of a run. `load` fetches a micro-batch, `update` is the optimizer's step, `between` is all other code."""

KINDS = ("parameter", "gradient", "optimizer", "activation", "buffer", "input", "temporary")
"""The uses of memory. A buffer is DeepSpeed's own: a bucket, gathered parameters, a flat copy."""

PLACES = ("device", "host", "pinned", "processor", "thread")
"""Where memory lies. `pinned` is host memory that the device may read. The last two count only if a CPU is the device:
what its operators take beside their results, on the program's own heap and on that of the thread that communicates."""

OPERATIONS = (
    "matmul",
    "attention",
    "convolution",
    "norm",
    "elementwise",
    "reduction",
    "copy",
    "embedding",
    "loss",
    "update",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send",
    "to_host",
    "to_device",
    "whole_attention",
    "from_disk",
    "to_disk",
)
"""The classes of operations. Links do those from `all_reduce` to `to_device`, and the device does the others.
`attention` is causal, and `whole_attention` computes all pairs of positions."""


class Storage(NamedTuple):
    """One block of memory.

    Attributes:
        size: bytes.
        kind: index in `KINDS`.
        place: index in `PLACES`.
        stream: of the device that allocates it; 0 is the one that computes. An allocator keeps a pool for each.
    """

    size: int
    kind: int
    place: int
    stream: int = 0


class MemoryEvent(NamedTuple):
    """The begin or the end of a storage's life.

    Attributes:
        storage: index in `ForeseenRun.storages`.
        is_made: 1 when it is allocated, 0 when it is freed.
    """

    storage: int
    is_made: int


class Moment(NamedTuple):
    """A part of the run. It lasts until the next one.

    Attributes:
        name: index in `MOMENTS`.
        step: the optimizer step, from 1; 0 before the first.
        micro_batch: of the step, from 0.
        event: index of its first event.
        operation: index of its first operation.
    """

    name: int
    step: int
    micro_batch: int
    event: int
    operation: int


class Operation(NamedTuple):
    """One operation of the device, or one transfer. They are in the order in which the program issues them.

    Attributes:
        kind: index in `OPERATIONS`.
        dtype: index in `ForeseenRun.dtypes`: of the inputs; `tf32` if 32-bit numbers are multiplied in it.
        flops: floating-point operations.
        moved: bytes that it reads and writes. For a transfer: bytes of the whole tensor on this rank. The program waits
            for a disk where it is 0.
        ranks: ranks of the group of a transfer; 1 for others.
        where: index in `ForeseenRun.modules`: the module that issues it.
        on_host: 1 if the host's processor does it, such as the update of an offloaded optimizer.
    """

    kind: int
    dtype: int
    flops: float
    moved: float
    ranks: int = 1
    where: int = 0
    on_host: int = 0

    def with_work(self, flops: float, moved: float) -> "Operation":
        """Returns the operation with other work. `_replace` takes three times as long, and a plan has 100,000."""
        kind, dtype, _, _, ranks, where, on_host = self
        return Operation(kind, dtype, flops, moved, ranks, where, on_host)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A number that the program asked of a fake tensor.

    Attributes:
        asker: the function and the place: `clip_grad_norm_ (deepspeed/runtime/utils.py:321)`.
        question: the operator, such as `item` or `equal`.
        answer: what the asker got.
        is_known: whether the answer comes from the table of known askers.
        count: of its asks.
    """

    asker: str
    question: str
    answer: str
    is_known: bool
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class ForeseenRun:
    """The run of rank 0 of a pretended world.

    Attributes:
        world: ranks.
        replicas: of the model.
        micro_batch: samples of a forward pass.
        accumulation: micro-batches of an optimizer step.
        tokens: in a sample of the last batch; None if the batches show none.
        sequence_ranks: ranks that share the tokens of a sample (Ulysses); 1 without it.
        parameters: of the whole model.
        trainable: of these, the parameters that are trained.
        ds_config: the configuration of the engine that trains.
        stage: the ZeRO stage of that engine.
        is_pipeline: whether the model is a pipeline, of which this is the first stage.
        pipeline_stages: of that pipeline; 1 without one.
        formats: number formats in which it multiplies matrices.
        program: the findings about the program, as `ProgramProfile` (`trial_lib/records/result.py`) has them. Its
            configuration, optimizer and flags decide which arms there are. Empty if the run was stopped before.
        dtypes: names that `Operation.dtype` points to.
        modules: names that `Operation.where` points to; the first is empty.
        storages: by index.
        events: in order.
        moments: in order.
        operations: in order.
        asks: of all numbers.
        rows: samples of a micro-batch as they arrive, in the last step; None if they are as many in each micro-batch.
        loading_s: real seconds to fetch each micro-batch but the first of an iterator, without those in which other
            processes had the processor.
        loads_beside: whether worker processes fetch them while the rank trains, at that pace.
        data_bytes: that the program took from the C library between `deepspeed.initialize` and its first forward pass,
            such as a data set. They are real, and no storage has them. 0 if unknown.
        process_bytes: of the process's own memory when the program called `deepspeed.initialize`, libraries among them,
            as a limit on a CPU counts it. 0 if unknown.
        import_s: seconds until the program called `deepspeed.initialize`.
        seconds: of the whole run.
        peak_bytes: of the process that foresaw.
        notes: sentences for the reader: what differs from a run on the device.
        imported: installed modules that the program has imported, for a fork server to have them ahead, and the
            variables that it has set before.
        versions: of Python, torch, DeepSpeed and others in its process. Empty in records of earlier versions.
        stopped: why the program cannot be foreseen, in one sentence with its line; empty if it was.
    """

    world: int
    replicas: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    tokens: int | None = None
    sequence_ranks: int = 1
    parameters: int = 0
    trainable: int = 0
    ds_config: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    is_pipeline: bool = False
    pipeline_stages: int = 1
    formats: tuple[str, ...] = ()
    program: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("",)
    storages: tuple[Storage, ...] = ()
    events: tuple[MemoryEvent, ...] = ()
    moments: tuple[Moment, ...] = ()
    operations: tuple[Operation, ...] = ()
    asks: tuple[Ask, ...] = ()
    rows: float | None = None
    loading_s: tuple[float, ...] = ()
    loads_beside: bool = False
    data_bytes: int = 0
    process_bytes: int = 0
    import_s: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    notes: tuple[str, ...] = ()
    imported: tuple[Import, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def zero_ranks(self) -> int:
        """The ranks over which ZeRO partitions states, and which exchange gradients."""
        # deepspeed/utils/groups.py: under Ulysses, those of all replicas.
        return self.replicas * self.sequence_ranks

    def operations_by_moment(self) -> list[tuple[Moment, tuple[Operation, ...]]]:
        """Returns each moment with its operations."""
        ends = [*(moment.operation for moment in self.moments[1:]), len(self.operations)]
        return [
            (moment, self.operations[moment.operation : end]) for moment, end in zip(self.moments, ends, strict=False)
        ]

    def events_by_moment(self) -> list[tuple[Moment, range]]:
        """Returns each moment with the indexes of its events."""
        ends = [*(moment.event for moment in self.moments[1:]), len(self.events)]
        return [(moment, range(moment.event, end)) for moment, end in zip(self.moments, ends, strict=False)]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "asks": [asdict(ask) for ask in self.asks]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseenRun":
        """Returns the run that `to_json` wrote.

        Raises:
            TypeError: a key is missing or unknown.
        """
        if plain.get("is_pipeline") and "pipeline_stages" not in plain:
            raise TypeError("the run of a pipeline does not say how many stages it has")
        records: dict[str, Any] = {
            "storages": Storage,
            "events": MemoryEvent,
            "moments": Moment,
            "operations": Operation,
        }
        made = {name: _records(record, plain[name]) for name, record in records.items()}
        made["asks"] = tuple(Ask(**each) for each in plain["asks"])
        lists = {name: tuple(value) for name, value in plain.items() if isinstance(value, list) and name not in made}
        return cls(**{**plain, **lists, **made})


def _records(record: Any, rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Returns named tuples. A run has half a million, and a row that has every field needs no call of Python's."""
    whole = len(record._fields)
    if all(len(row) == whole for row in rows):
        return tuple(map(tuple.__new__, repeat(record), rows))
    return tuple(record(*row) for row in rows)
