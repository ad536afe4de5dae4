"""What the driver orders of a rank. A rank imports this module, so it needs only the standard library."""

import functools
import json
import os
import site
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import Arrival, HostMoment, Import


def now() -> HostMoment:
    return [this_boot(), since_boot(), time.time()]


def seconds_since(moment: HostMoment) -> float:
    """Returns the seconds since a moment of this host or, by the wall clocks, of another one."""
    boot, steady, wall = moment
    passed = since_boot() - float(steady) if boot == this_boot() else time.time() - float(wall)
    return max(0.0, passed)


def since_boot() -> float:
    """Returns the seconds since this host's boot, which all its processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def this_boot() -> str:
    """Returns what tells this boot of this machine from any other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_RecordT = TypeVar("_RecordT")


def exact_record(kind: type[_RecordT], plain: Mapping[str, Any]) -> _RecordT:
    """Raises ValueError: a key is missing or unknown."""
    check_keys(kind, plain)
    return kind(**plain)


def check_keys(kind: type, plain: Mapping[str, Any]) -> None:
    """Raises ValueError: a key is missing or unknown."""
    names = {each.name for each in fields(kind)}
    if faults := [
        *(f"`{name}` is missing" for name in sorted(names - plain.keys())),
        *(f"`{name}` is unknown" for name in sorted(plain.keys() - names)),
    ]:
        raise ValueError(f"{kind.__name__}: {', '.join(faults)}.")


# The optimizer steps that a trial measures.


@dataclass(frozen=True)
class StepWindow:
    start_step: int = 3  # the first that counts, from 1. The steps before it warm up.
    end_step: int = 5  # steps up to this one are always measured
    # Counted steps after which the measurement ends, whatever its error. A program that waits for loader workers goes
    # on until their cycle is covered.
    max_steps: int = 40
    # Counted seconds after which it ends as well, once `end_step` is reached. A program that waits for loader workers
    # gets more, for a whole cycle of theirs. On a noisy machine more seconds help little, because readings differ more
    # between processes than within one. A trial also takes about a second to start, so longer windows tell less in a
    # given time.
    max_seconds: float = 0.5
    relative_error: float = 0.02  # a relative standard error of the mean step time that is small enough
    # Counted steps that are enough if the program ends before `end_step`. None if it has to come so far.
    least_steps: int | None = None

    @property
    def min_steps(self) -> int:
        """Counted steps before the first decision."""
        return self.end_step - self.start_step + 1

    @property
    def enough_at_end(self) -> int:
        """Counted steps that are enough if the program ends."""
        return self.min_steps if self.least_steps is None else min(self.least_steps, self.min_steps)


# The work that a driver orders of a rank.

# The beginning of the last line in the log of a rank whose program ends it by a signal, before it is measured.
SENDS = "zerotune: the program sends "

ANOTHER_HAS_FAILED = "Another rank has failed."  # the words of a rank that ends because another one has


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    window: StepWindow  # the optimizer steps to measure
    memory_limit: int | None  # bytes that a rank may use of its slot; None for all of a GPU
    # The best throughput so far, in samples/s over all ranks. When the trial cannot reach it any more, its ranks end it
    # as `too_slow`. None to measure to the end.
    to_beat: float | None = None
    # Tokens in a sample of the longest batch of the data. One warm-up step trains on such a batch, so that the peak
    # memory is a whole training's. None for batches as they come.
    longest_sequence: int | None = None
    flops_per_sample: float | None = None  # FLOPs of one sample, for the metrics; None for a profile, which counts them
    # Number formats of the program's arithmetic, as `CountedSteps.metrics` takes them. They decide on the peak FLOP/s
    # that model FLOPs utilisation is relative to. None leaves the utilisation out.
    formats: tuple[str, ...] | None = None
    arrival: Arrival = field(default_factory=Arrival)  # how samples show in the batches that arrive
    as_typed: bool = False  # whether the program runs as it was typed. The candidate then changes nothing.
    # The switches that the rank turns in the program, by name, as `zerotune.trial_lib.messages.turned` has them
    turned: dict[str, Any] = field(default_factory=dict)
    # The options of the program that the search varies, with the values to try. A profile records what the program's
    # own parser says of them.
    varied_options: dict[str, list[Any]] = field(default_factory=dict)
    traces: bool = False  # whether some steps after the counted ones are traced
    weighs: bool = False  # whether it notes norms of gradients and the change of the weights by the first updates
    # A share by which it moves each weight before the first step. It then also draws other random numbers. None to
    # train as it is.
    rounding: float | None = None
    # Model replicas that the engine has to have, if the candidate's layout decides on them; else None
    replicas: int | None = None
    # Where the program's data begin: the share of an epoch that comes before. 0 for the beginning.
    data_offset: float = 0.0
    stream_offset: int = 0  # the samples of a rank that come before, for data without a length
    data_step: int = 0  # the samples of a rank in an optimizer step. Batches of any size begin at a multiple of it.
    ends_at_unbuilt_ops: bool = False  # whether a rank ends where DeepSpeed would compile an op
    ends_at_arrival: bool = False  # whether a rank ends when its first micro-batch arrives, which no stage's does


@dataclass(frozen=True, kw_only=True)
class SizeOrder(ProbeSettings):
    """One micro-batch size to measure. Each size is a trial of its own.

    Paths are listed by rank.
    """

    arguments: list[str]  # the program's command line
    # Variables to change before this size runs; None removes one. Empty for the first size, whose variables its
    # processes were started with.
    environment: dict[str, str | None] = field(default_factory=dict)
    overrides: dict[str, Any]  # the candidate's part of the DeepSpeed configuration; empty for a program as typed
    with_profile: bool  # whether to profile the model too
    logs: list[str]  # the file that each rank prints to
    measurements: list[str]  # the file for each rank's measurement
    failures: list[str]  # the file for the exception that ended a rank
    states: list[str]  # the file in which each rank keeps the other ranks informed, if they share a folder
    engine_built: list[str]  # the file that each rank writes when the engine exists

    @property
    def is_typed_profile(self) -> bool:
        """Whether this run has to show the facts that only the program as typed shows.

        A submitted trial runs as typed too. It is counted by the facts of the profile, as its rivals are.
        """
        return self.as_typed and self.with_profile


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """Everything that the ranks of one launch have to do: one trial, or the sizes of a sweep."""

    program: dict[str, str]  # `{"script": path}` or `{"module": name}`
    # The option that tells the program its local rank, before the arguments, as `deepspeed` passes `--local_rank=N`.
    # Empty if the launcher passes none.
    local_rank_option: str
    model_dir: str  # the working directory
    scratch: str  # a folder that replaces the user's files for everything that the program would write
    protected_before: float  # seconds since the epoch. The ranks never change a file of the user's that is older.
    patience_s: float  # seconds after which ranks that all wait for each other count as waiting forever
    # The kind of device of the slots, `cuda` or `cpu`. A rank on another kind ends the trial. None for any.
    device: str | None
    launched_at: HostMoment  # the moment of its launch
    sizes: tuple[SizeOrder, ...]  # to measure, in this order
    withdrawal: str  # the file for the reason why no further size was measured
    bytes_per_sample: float = 0.0  # the most memory that one more sample may take, in a sweep
    headroom: float = 0.0  # the share of the memory that a further size has to leave free
    # Whether all ranks see the files of the order. The hosts of a Ray cluster have files of their own.
    shares_folder: bool = True
    hidden: tuple[str, ...] = ()  # ZeroTune's folders that the program does not see

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RankOrder":
        check_keys(cls, plain)
        sizes = tuple(_size_order(size) for size in plain["sizes"])
        return cls(**{**plain, "sizes": sizes, "hidden": tuple(plain["hidden"])})


@dataclass(frozen=True, kw_only=True)
class TrainingOrder:
    """The work of a rank in a full experiment: the user's program as it is, to its own end.

    `TrainingSpec` has the length of the training, its checkpoints and its metrics; the program reads that itself.
    """

    program: dict[str, str]  # as `RankOrder` has it
    local_rank_option: str  # as `RankOrder` has it
    arguments: list[str]  # the program's command line
    ds_config: dict[str, Any]  # the DeepSpeed configuration to train with
    # Whether the program's own configuration is in its code, so that the rank has to merge `ds_config`
    is_in_code: bool
    device: str | None  # as `RankOrder` has it
    turned: dict[str, Any] = field(default_factory=dict)  # as `ProbeSettings` has it
    finished: list[str]  # the file that each rank writes at the end of its program, by rank
    failures: list[str]  # the file for the exception that ended a rank, by rank


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


# The step of a rank from one micro-batch size of a sweep to the next.


class NextSize(SystemExit):
    """Ends the measurement of one size. The probe raises it out of an optimizer step, and another size follows.

    Code that can keep its engine catches it. The code sets the engine to the new batch, calls `go_on` and trains. Any
    other code lets it pass, as it lets `sys.exit()` pass. Such a program is run again from its beginning.

    Args:
        micro_batch_size: samples of a rank's forward pass.
        go_on: prepares the measurement of the next size. Every rank has to call it after it has dropped the data and
            the loop of the last size. It may end the rank.
    """

    def __init__(
        self, arguments: list[str], micro_batch_size: int, gradient_accumulation_steps: int, go_on: Callable[[], None]
    ) -> None:
        super().__init__(0)
        self.arguments = arguments
        self.micro_batch_size = micro_batch_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.go_on = go_on

    def set_batch(self, engine: Any) -> None:
        """Sets a `DeepSpeedEngine` that has just ended an optimizer step to the batch of the next size.

        DeepSpeed's own setters leave two things out. One is the count that decides which micro-batch ends a step. The
        other is ZeRO's state of the accumulation, which is in buffers in host memory (`runtime/zero/stage_1_and_2.py`).
        """
        steps = self.gradient_accumulation_steps
        engine.set_train_micro_batch_size(self.micro_batch_size)
        engine.set_train_batch_size(self.micro_batch_size * steps * engine.dp_world_size)
        engine.micro_steps -= engine.micro_steps % steps
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = steps
        getattr(engine.optimizer, "accumulated_grads_in_cpu", {}).clear()


# The description of a training. The driver writes it, and every rank reads it.

# One of `{"batches": n}`, `{"records": n}` and `{"epochs": n}`; a batch is an optimizer step.
UnitLength = dict[str, int]

# The environment variable with the path of the spec, for the ranks of a script.
SPEC_VARIABLE = "ZEROTUNE_TRAINING_SPEC"


@dataclass(frozen=True)
class TrainingSpec:
    """One training: a trial that is measured, or a full experiment."""

    trial: str | None  # the class, as `module:Class`; None for a script
    hparams: dict[str, Any]  # the experiment's hyperparameters, with the training's configuration merged in
    experiment_config: dict[str, Any] = field(default_factory=dict)  # the whole experiment, without secrets
    seed: int = 0  # of everything random
    # How long to train. None trains until the process is ended from outside, and neither validates nor saves.
    length: UnitLength | None = None
    validation_period: UnitLength | None = None  # the longest time between validations; None validates at the end
    checkpoint_period: UnitLength | None = None  # the longest time between checkpoints; None saves at the end
    report_period: int = 100  # optimizer steps between two reports of the training metrics
    records_per_epoch: int | None = None  # samples of an epoch; None takes the number in the training loader
    metric: str = "validation_loss"  # the validation metric that decides which checkpoint is best
    smaller_is_better: bool = True  # whether a smaller value of it is better
    # The folder of the checkpoints. The training resumes from the newest intact one. None in a trial, which keeps
    # nothing.
    checkpoints: str | None = None
    metrics: str | None = None  # the file to which rank 0 appends JSON lines
    finished: str | None = None  # the file that rank 0 writes at the end of the training
    tensorboard: str | None = None  # the folder for TensorBoard's files
    # The name of that newest intact one, for a script. A trial class finds it by itself.
    latest_checkpoint: str | None = None
    scratch: str | None = None  # a folder for files that are only needed while the ranks run
    stop: str | None = None  # the folder of the full experiment's `StopRequest`, which a script may follow

    @property
    def is_trial(self) -> bool:
        """Whether this is a trial. A trial is measured and ended from outside; a full experiment is not."""
        return self.checkpoints is None

    def write(self, path: Path) -> None:
        """Writes the spec. Only its owner may read it, because hyperparameters may contain secrets."""
        write_whole(path, self.to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def read_training_spec(path: Path) -> TrainingSpec:
    return TrainingSpec(**json.loads(path.read_text()))


def training_spec_of_this_rank() -> TrainingSpec | None:
    """Returns the spec of this process, as a rank of a script; None outside of ZeroTune."""
    path = os.environ.get(SPEC_VARIABLE)
    return None if path is None else read_training_spec(Path(path))


def modules_in(imported: Sequence[Import]) -> list[str]:
    return [each for each in imported if isinstance(each, str)]


def installed_folders() -> tuple[str, ...]:
    """Returns the folders of installed modules, with a separator at their ends, as this interpreter may spell them."""
    standard = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = {*standard, *site.getsitepackages(), site.getusersitepackages()}
    return tuple({f"{spelt}{os.sep}" for folder in folders for spelt in (folder, os.path.realpath(folder))})


# Predicts whether the next micro-batch size of a sweep fits, from the memory of the sizes so far. Pure functions.


@dataclass(frozen=True)
class SizeMemory:
    """The memory of one size, on the rank that has used most."""

    samples: int  # its micro-batch size
    above_initialize: int  # bytes of its peak above the bytes in use after `deepspeed.initialize`
    available: int | None  # bytes that the slot still had then, on the rank with the least; None without a limit


def foreseen(measured: Sequence[SizeMemory], samples: int, bytes_per_sample: float) -> float:
    """Returns the predicted bytes of a size above initialisation. `measured` is ascending, and not empty.

    The last two sizes give a straight line. One size gives a line with the slope of a sample: the estimate, or the most
    that a sample can have had in any measured size. The peak of the optimizer's step can hide the activations of small
    sizes, so the line may be too flat. The activations alone are therefore a lower bound.
    """
    last = measured[-1]
    slope = a_sample = min(bytes_per_sample, *(size.above_initialize / size.samples for size in measured))
    if len(measured) > 1:
        before = measured[-2]
        slope = max(0.0, (last.above_initialize - before.above_initialize) / (last.samples - before.samples))
    on_the_line = last.above_initialize + slope * (samples - last.samples)
    return max(on_the_line, a_sample * samples)


def will_fit(measured: Sequence[SizeMemory], samples: int, bytes_per_sample: float, headroom: float) -> bool:
    """Whether it does with a share `headroom` of the memory free that was available after initialisation."""
    bounds = [size.available for size in measured if size.available is not None]
    if not bounds:
        return True
    return foreseen(measured, samples, bytes_per_sample) <= min(bounds) * (1 - headroom)
