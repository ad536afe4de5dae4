"""The work that a driver orders of a rank. A rank imports this module, so it needs only the standard library.

The order travels as JSON inside a `LaunchRequest`. Driver and rank run the same ZeroTune. A key that one of them does
not have is therefore a fault, and `from_json` raises it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.wire.arrival import Arrival
from trial_lib.wire.exact_record import check_keys, exact_record
from trial_lib.wire.moments import HostMoment
from trial_lib.wire.step_window import StepWindow

KEPT = "kept"
"""The key of a measurement that a rank has kept in case it gets no further."""

SENDS = "zerotune: the program sends "
"""The beginning of the last line in the log of a rank whose program ends it by a signal, before it is measured."""

ANOTHER_HAS_FAILED = "Another rank has failed."
"""The words of a rank that ends because another one has."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How one trial is measured.

    Attributes:
        window: the optimizer steps to measure.
        memory_limit: bytes that a rank may use of its slot; None for all of a GPU.
        to_beat: the best throughput so far, in samples/s over all ranks. When the trial cannot reach it any more, its
            ranks end it as `too_slow`. None to measure to the end.
        longest_sequence: tokens in a sample of the longest batch of the data. One warm-up step trains on such a batch,
            so that the peak memory is a whole training's. None for batches as they come.
        flops_per_sample: FLOPs of one sample, for the metrics; None for a profile, which counts them.
        formats: number formats of the program's arithmetic, as `CountedSteps.metrics` takes them. They decide on the
            peak FLOP/s that model FLOPs utilisation is relative to. None leaves the utilisation out.
        arrival: how samples show in the batches that arrive.
        as_typed: whether the program runs as it was typed. The candidate then changes nothing.
        turned: the switches that the rank turns in the program, by name, as `trial_lib.wire.turned` has them.
        varied_options: the options of the program that the search varies, with the values to try. A profile records
            what the program's own parser says of them.
        traces: whether some steps after the counted ones are traced.
        replicas: model replicas that the engine has to have, if the candidate's layout decides on them; else None.
        ends_at_unbuilt_ops: whether a rank ends where DeepSpeed would compile an op.
    """

    window: StepWindow
    memory_limit: int | None
    to_beat: float | None = None
    longest_sequence: int | None = None
    flops_per_sample: float | None = None
    formats: tuple[str, ...] | None = None
    arrival: Arrival = field(default_factory=Arrival)
    as_typed: bool = False
    turned: dict[str, Any] = field(default_factory=dict)
    varied_options: dict[str, list[Any]] = field(default_factory=dict)
    traces: bool = False
    replicas: int | None = None
    ends_at_unbuilt_ops: bool = False


@dataclass(frozen=True, kw_only=True)
class SizeOrder(ProbeSettings):
    """One micro-batch size to measure. Each size is a trial of its own.

    Paths are listed by rank.

    Attributes:
        arguments: the program's command line.
        environment: variables to change before this size runs; None removes one. Empty for the first size, whose
            variables its processes were started with.
        overrides: the candidate's part of the DeepSpeed configuration; empty for a program as typed.
        with_profile: whether to profile the model too.
        logs: the file that each rank prints to.
        measurements: the file for each rank's measurement.
        failures: the file for the exception that ended a rank.
        states: the file in which each rank keeps the other ranks informed, if they share a folder.
        engine_built: the file that each rank writes when the engine exists.
    """

    arguments: list[str]
    environment: dict[str, str | None] = field(default_factory=dict)
    overrides: dict[str, Any]
    with_profile: bool
    logs: list[str]
    measurements: list[str]
    failures: list[str]
    states: list[str]
    engine_built: list[str]

    @property
    def is_typed_profile(self) -> bool:
        """Whether this run has to show the facts that only the program as typed shows.

        A submitted trial runs as typed too. It is counted by the facts of the profile, as its rivals are.
        """
        return self.as_typed and self.with_profile


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Everything that the ranks of one launch have to do: one trial, or the sizes of a sweep.

    Attributes:
        program: `{"script": path}` or `{"module": name}`.
        local_rank_option: the option that tells the program its local rank, before the arguments, as `deepspeed` passes
            `--local_rank=N`. Empty if the launcher passes none.
        model_dir: the working directory.
        scratch: a folder that replaces the user's files for everything that the program would write.
        protected_before: seconds since the epoch. The ranks never change a file of the user's that is older.
        patience_s: seconds after which ranks that all wait for each other count as waiting forever.
        device: the kind of device of the slots, `cuda` or `cpu`. A rank on another kind ends the trial. None for any.
        launched_at: the moment of its launch.
        sizes: to measure, in this order.
        withdrawal: the file for the reason why no further size was measured.
        bytes_per_sample: memory that one more sample is expected to take, in a sweep.
        headroom: the share of the memory that a further size has to leave free.
        shares_folder: whether all ranks see the files of the order. The hosts of a Ray cluster have files of their own.
        hidden: ZeroTune's folders that the program does not see.
    """

    program: dict[str, str]
    local_rank_option: str
    model_dir: str
    scratch: str
    protected_before: float
    patience_s: float
    device: str | None
    launched_at: HostMoment
    sizes: tuple[SizeOrder, ...]
    withdrawal: str
    bytes_per_sample: float = 0.0
    headroom: float = 0.0
    shares_folder: bool = True
    hidden: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RankOrder":
        """Returns the order that `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        check_keys(cls, plain)
        sizes = tuple(_size_order(size) for size in plain["sizes"])
        return cls(**{**plain, "sizes": sizes, "hidden": tuple(plain["hidden"])})


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """The work of a rank in a full experiment: the user's program as it is, to its own end.

    `TrainingSpec` has the length of the training, its checkpoints and its metrics; the program reads that itself.

    Attributes:
        program: as `RankOrder` has it.
        local_rank_option: as `RankOrder` has it.
        arguments: the program's command line.
        ds_config: the DeepSpeed configuration to train with.
        is_in_code: whether the program's own configuration is in its code, so that the rank has to merge `ds_config`.
        turned: as `ProbeSettings` has it.
        device: as `RankOrder` has it.
        finished: the file that each rank writes at the end of its program, by rank.
        failures: the file for the exception that ended a rank, by rank.
    """

    program: dict[str, str]
    local_rank_option: str
    arguments: list[str]
    ds_config: dict[str, Any]
    is_in_code: bool
    device: str | None
    turned: dict[str, Any] = field(default_factory=dict)
    finished: list[str]
    failures: list[str]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "TrainingOrder":
        """Returns the order that `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        return exact_record(cls, plain)


def _size_order(plain: Mapping[str, Any]) -> SizeOrder:
    check_keys(SizeOrder, plain)
    formats = plain["formats"]
    return SizeOrder(
        **{
            **plain,
            "window": exact_record(StepWindow, plain["window"]),
            "arrival": exact_record(Arrival, plain["arrival"]),
            "formats": None if formats is None else tuple(formats),
        }
    )
