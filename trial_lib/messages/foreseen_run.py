"""A foreseen run: its order, and its record, one rank's steps under fake tensors, event by event."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import repeat
from typing import Any, NamedTuple

from zerotune.trial_lib.messages.measurement import HostMoment, Import

# Packages whose code a foreseen run changes while it is loaded, so that no fork server may have imported them.
CUDA_PACKAGES = ("bitsandbytes", "liger_kernel")

DEVICE_NAME = "NVIDIA H100 80GB"  # the device that a program finds, unless a plan asks for another one
CAPABILITY = 9.0  # its compute capability
BFLOAT16_SINCE = 8.0  # the compute capability from which matrix units take bfloat16


@dataclass(frozen=True, kw_only=True)
class ForeseeOrder:
    """One run to foresee: the program, and the world that it is to find."""

    program: dict[str, str]  # `{"script": path}` or `{"module": name}`
    local_rank_option: str = ""  # as `RankOrder` has it
    arguments: list[str] = field(default_factory=list)  # the program's command line
    model_dir: str  # the working directory
    scratch: str  # a folder that replaces the user's files for everything that the program would write
    protected_before: float  # seconds since the epoch. The rank never changes a file of the user's that is older.
    # Merged into the DeepSpeed configuration of the engine that trains
    overrides: dict[str, Any] = field(default_factory=dict)
    turned: dict[str, Any] = field(default_factory=dict)  # the switches that the rank turns in the program, by name
    # The options of the program that a search varies, with the values to try
    varied_options: dict[str, list[Any]] = field(default_factory=dict)
    world: int  # ranks of the pretended world
    ranks_per_host: int  # of these, the ranks on one host
    device_bytes: int  # memory of the pretended device, for a program that asks
    device_name: str = DEVICE_NAME  # its name, likewise
    # Its compute capability, likewise. Some programs choose number formats and kernels by it.
    capability: float = CAPABILITY
    steps: int  # optimizer steps after which the run ends
    result: str  # the file for the `ForeseenRun`
    log: str = ""  # the file with the rank's output
    launched_at: HostMoment  # the moment of its launch
    patience_s: float = 600.0  # seconds after which the rank records where the program is, and ends
    hidden: list[str] = field(default_factory=list)  # as `RankOrder` has it


# The record of a foreseen run: one rank's steps under fake tensors, event by event.

# The parts of a run. `load` fetches a micro-batch, `update` is the optimizer's step, `between` is all other code.
MOMENTS = ("initialize", "load", "forward", "backward", "update", "between")

# The uses of memory. A buffer is DeepSpeed's own: a bucket, gathered parameters, a flat copy.
KINDS = ("parameter", "gradient", "optimizer", "activation", "buffer", "input", "temporary")

PLACES = ("device", "host", "pinned", "processor", "thread")
"""Where memory lies. `pinned` is host memory that the device may read. The last two count only if a CPU is the device:
what its operators take beside their results, on the program's own heap and on that of the thread that communicates."""

OPERATIONS = (
    *("matmul", "attention", "convolution", "norm", "elementwise", "reduction", "copy", "embedding", "loss"),
    *("update", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "to_host"),
    *("to_device", "whole_attention", "from_disk", "to_disk"),
)
"""The classes of operations. Links do those from `all_reduce` to `to_device`, and the device does the others.
`attention` is causal, and `whole_attention` computes all pairs of positions."""


class Storage(NamedTuple):
    size: int  # bytes
    kind: int  # index in `KINDS`
    place: int  # index in `PLACES`
    stream: int = 0  # of the device that allocates it; 0 is the one that computes. An allocator keeps a pool for each.


class MemoryEvent(NamedTuple):
    storage: int  # index in `ForeseenRun.storages`
    is_made: int  # 1 when it is allocated, 0 when it is freed


class Moment(NamedTuple):
    """A part of the run. It lasts until the next one."""

    name: int  # index in `MOMENTS`
    step: int  # the optimizer step, from 1; 0 before the first
    micro_batch: int  # of the step, from 0
    event: int  # index of its first event
    operation: int  # index of its first operation


class Operation(NamedTuple):
    """One operation of the device, or one transfer. They are in the order in which the program issues them."""

    kind: int  # index in `OPERATIONS`
    dtype: int  # index in `ForeseenRun.dtypes`: of the inputs; `tf32` if 32-bit numbers are multiplied in it
    flops: float  # floating-point operations
    # Bytes that it reads and writes. For a transfer: bytes of the whole tensor on this rank. The program waits for a
    # disk where it is 0.
    moved: float
    ranks: int = 1  # ranks of the group of a transfer; 1 for others
    where: int = 0  # index in `ForeseenRun.modules`: the module that issues it
    on_host: int = 0  # 1 if the host's processor does it, such as the update of an offloaded optimizer
    apart: int = 0  # how far the next rank of a transfer's group is, such as 1 for neighbours; 0 if nobody knows

    def with_work(self, flops: float, moved: float) -> "Operation":
        """Returns the operation with other work. `_replace` takes three times as long, and a plan has 100,000."""
        kind, dtype, _, _, *others = self
        return Operation(kind, dtype, flops, moved, *others)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A number that the program asked of a fake tensor."""

    asker: str  # the function and the place: `clip_grad_norm_ (deepspeed/runtime/utils.py:321)`
    question: str  # the operator, such as `item` or `equal`
    answer: str  # what the asker got
    is_known: bool  # whether the answer comes from the table of known askers
    count: int = 1  # of its asks


@dataclass(frozen=True, kw_only=True)
class ForeseenRun:
    """The run of rank 0 of a pretended world."""

    world: int  # ranks
    replicas: int = 1  # of the model
    micro_batch: int = 1  # samples of a forward pass
    accumulation: int = 1  # micro-batches of an optimizer step
    tokens: int | None = None  # in a sample of the last batch; None if the batches show none
    sequence_ranks: int = 1  # ranks that share the tokens of a sample (Ulysses); 1 without it
    parameters: int = 0  # of the whole model
    trainable: int = 0  # of these, the parameters that are trained
    ds_config: dict[str, Any] = field(default_factory=dict)  # the configuration of the engine that trains
    stage: int = 0  # the ZeRO stage of that engine
    is_pipeline: bool = False  # whether the model is a pipeline, of which this is the first stage
    pipeline_stages: int = 1  # of that pipeline; 1 without one
    formats: tuple[str, ...] = ()  # number formats in which it multiplies matrices
    # The findings about the program, as `ProgramProfile` (`trial_lib/records/result.py`) has them. Its configuration,
    # optimizer and flags decide which arms there are. Empty if the run was stopped before.
    program: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()  # names that `Operation.dtype` points to
    modules: tuple[str, ...] = ("",)  # names that `Operation.where` points to; the first is empty
    storages: tuple[Storage, ...] = ()  # by index
    events: tuple[MemoryEvent, ...] = ()  # in order
    moments: tuple[Moment, ...] = ()  # in order
    operations: tuple[Operation, ...] = ()  # in order
    asks: tuple[Ask, ...] = ()  # of all numbers
    # Samples of a micro-batch as they arrive, in the last step; None if they are as many in each micro-batch
    rows: float | None = None
    # Real seconds to fetch each micro-batch but the first of an iterator, without those in which other processes had
    # the processor
    loading_s: tuple[float, ...] = ()
    loads_beside: bool = False  # whether worker processes fetch them while the rank trains, at that pace
    # That the program took from the C library between `deepspeed.initialize` and its first forward pass, such as a data
    # set. They are real, and no storage has them. 0 if unknown.
    data_bytes: int = 0
    import_s: float = 0.0  # seconds until the program called `deepspeed.initialize`
    seconds: float = 0.0  # of the whole run
    peak_bytes: int = 0  # of the process that foresaw
    notes: tuple[str, ...] = ()  # sentences for the reader: what differs from a run on the device
    # Installed modules that the program has imported, for a fork server to have them ahead, and the variables that it
    # has set before
    imported: tuple[Import, ...] = ()
    # Of Python, torch, DeepSpeed and others in its process. Empty in records of earlier versions.
    versions: dict[str, str] = field(default_factory=dict)
    stopped: str = ""  # why the program cannot be foreseen, in one sentence with its line; empty if it was

    @property
    def zero_ranks(self) -> int:
        """The ranks over which ZeRO partitions states, and which exchange gradients."""
        # deepspeed/utils/groups.py: under Ulysses, those of all replicas.
        return self.replicas * self.sequence_ranks

    def shares_states(self, operation: Operation) -> bool:
        """Returns whether the group of a transfer has the ranks that exchange gradients. As many others may share a
        layer, and are neighbours.
        """
        shards = max(1, self.world // self.zero_ranks // self.pipeline_stages)
        return operation.ranks == self.zero_ranks and operation.apart in (0, shards)

    def operations_by_moment(self) -> list[tuple[Moment, tuple[Operation, ...]]]:
        ends = [*(moment.operation for moment in self.moments[1:]), len(self.operations)]
        return [
            (moment, self.operations[moment.operation : end]) for moment, end in zip(self.moments, ends, strict=False)
        ]

    def events_by_moment(self) -> list[tuple[Moment, range]]:
        ends = [*(moment.event for moment in self.moments[1:]), len(self.events)]
        return [(moment, range(moment.event, end)) for moment, end in zip(self.moments, ends, strict=False)]

    def to_json(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**plain, "asks": [asdict(ask) for ask in self.asks]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseenRun":
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
        # Of earlier versions.
        kept = {name: value for name, value in plain.items() if name != "process_bytes"}
        lists = {name: tuple(value) for name, value in kept.items() if isinstance(value, list) and name not in made}
        return cls(**{**kept, **lists, **made})


def _records(record: Any, rows: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    # Named tuples. A run has half a million, and a row that has every field needs no call of Python's.
    whole = len(record._fields)
    if all(len(row) == whole for row in rows):
        return tuple(map(tuple.__new__, repeat(record), rows))
    return tuple(record(*row) for row in rows)
