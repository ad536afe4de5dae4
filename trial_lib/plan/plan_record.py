"""A plan's record and its files. All figures in it are foreseen: no device has measured them."""

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PositiveInt, field_validator, model_validator

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import OWNERS_FILE, make_own_folder
from zerotune.trial_lib.messages.foreseen_run import Ask, ForeseenRun
from zerotune.trial_lib.plan.arms import PlanArm, with_switches
from zerotune.trial_lib.plan.fits import PeakForecast, peak_interval
from zerotune.trial_lib.plan.scaling import ArmRuns, Growth, growth_between, with_common_loading
from zerotune.trial_lib.plan.step_time import PlannedStep
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.folders import AnswerFolder
from zerotune.trial_lib.records.switches import switch_key
from zerotune.trial_lib.records.units import percent
from zerotune.trial_lib.search.knobs import ZERO_STAGES, ZeroStage

LIKELY = 0.5
"""An arm whose probability to fit is at least this counts as one that fits."""


_Count = Annotated[int, Field(ge=1)]
_CountOrNone = Annotated[int, Field(ge=0)]
_Amount = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Foreseen(FrozenRecord):
    """A part of a plan. All its figures are finite. It may come from a file that was damaged."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlannedRange(_Foreseen):
    """A foreseen figure with the ends of its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of_peak(cls, forecast: PeakForecast, capacity: float) -> "PlannedRange":
        low, high = peak_interval(forecast, capacity)
        return cls(value=forecast.needed.mean, low=low, high=high)

    @classmethod
    def of_rate(cls, value: float, step: PlannedStep) -> "PlannedRange":
        return cls(value=value, low=value * step.seconds / step.high, high=value * step.seconds / step.low)

    def times(self, factor: float) -> "PlannedRange":
        return PlannedRange(value=self.value * factor, low=self.low * factor, high=self.high * factor)


class PlannedArm(_Foreseen):
    """One arm on some devices, at its fastest micro-batch that fits, or at its smallest if none does."""

    label: str  # such as `z3-offload-optimizer`
    # The settings that make the arm, in the shape of the DeepSpeed configuration
    knobs: dict[str, Any] = Field(default_factory=dict)
    ds_config: dict[str, Any] = Field(default_factory=dict)  # the complete configuration at this micro-batch
    is_own: bool = False  # whether it is the arm of the user's configuration
    is_typed: bool = False  # whether its batch is the user's as well
    switches: dict[str, str] = Field(default_factory=dict)  # as `PlanArm` has them
    fits: _Share = 0.0  # the probability that it fits at this micro-batch, on the device and in the host's memory
    # Samples that fit at even odds or better. 0 if not even the smallest batch does.
    largest_micro_batch: _CountOrNone = 0
    most_micro_batch: _CountOrNone = 0  # the largest that the kept global batch allows. The memory may allow more.
    micro_batch: _Count = 1  # samples
    accumulation: _Count = 1  # micro-batches of an optimizer step
    samples_per_s: PlannedRange | None = None  # over all devices. None if it does not fit.
    # The same at each micro-batch (samples) that was timed
    speeds: dict[int, float] = Field(default_factory=dict)
    tokens_per_s: PlannedRange | None = None  # over all devices. None if the batches show no tokens.
    mfu: PlannedRange | None = None  # the share of the device's rate of dense products. None if that is not known.
    without_loading: float | None = None  # samples a second over all devices if none waits for data; None if none does
    # Of a billion tokens, in the currency of the price. None without a price or tokens.
    cost: PlannedRange | None = None
    peak: PlannedRange | None = None  # bytes of a device at the peak of a step, with the allocator's and the context's
    # As `PlannedStep` has it, of its step; 1 if it has no speed
    apart: Annotated[float, Field(ge=1)] = 1.0
    peak_moment: str = ""  # the moment of that peak, one of `MOMENTS`
    # Bytes of a device at that peak by kind. `overhead` is what is beside live storages.
    memory: dict[str, float] = Field(default_factory=dict)
    host: _Amount = 0.0  # bytes that each rank keeps in its host's memory
    # Of an optimizer step by part, as far as other parts do not hide them
    seconds: dict[str, float] = Field(default_factory=dict)
    hidden_s: float = 0.0  # seconds of transfers that go on beside the computation
    memory_bound: str = ""  # the part of the memory that is largest, in words
    time_bound: str = ""  # the part of the step that takes longest, in words
    is_scaled: bool = False  # whether its run was of another number of ranks, whose states were divided anew
    # Names of the foreseen runs that it comes from (`PlanPaths.run`), the larger micro-batch last
    runs: tuple[str, ...] = ()
    stopped: str = ""  # why it cannot be foreseen, in a sentence; empty if it was

    @model_validator(mode="after")
    def _has_a_stage(self) -> "PlannedArm":
        for config in (self.knobs, self.ds_config):
            section = config.get("zero_optimization", {})
            stage = section.get("stage", 0) if isinstance(section, dict) else None
            if not self.stopped and stage not in ZERO_STAGES:
                raise ValueError(f"the ZeRO stage {stage!r} is none of {ZERO_STAGES}")
        return self

    def without_speed(self) -> "PlannedArm":
        gone = {"samples_per_s": None, "tokens_per_s": None, "mfu": None, "cost": None, "without_loading": None}
        emptied = {"speeds": {}, "seconds": {}, "hidden_s": 0.0, "time_bound": "", "apart": 1.0}
        return self.model_copy(update={**gone, **emptied})

    @property
    def is_likely(self) -> bool:
        """Whether it fits at even odds or better."""
        return not self.stopped and self.largest_micro_batch > 0


class PlannedCount(_Foreseen):
    devices: _Count  # their number
    label: str = ""  # of the arm; empty if none trains there
    micro_batch: _CountOrNone = 0  # samples; 0 if no arm trains
    accumulation: _Count = 1  # micro-batches of an optimizer step
    fits: _Share = 0.0  # the probability that it fits
    samples_per_s: PlannedRange | None = None  # over all devices. None if no arm trains.
    apart: Annotated[float, Field(ge=1)] = 1.0  # as `PlannedStep` has it, of its step
    peak: PlannedRange | None = None  # bytes on a device: of that arm, or of the arm that needs least
    # Samples of an optimizer step, if so many devices cannot divide the kept global batch, or have no micro-batch for
    # it. None if it is kept, or free.
    other_batch: int | None = None


class PlannedLayout(_Foreseen):
    """One layout of a decoder on some devices, by formulas."""

    tensor: _Count  # ranks of a tensor-parallel group
    sequence: _Count = 1  # ranks that share the tokens of a sample
    pipeline: _Count  # stages
    expert: _Count = 1  # ranks that share the experts
    replicas: _Count
    zero_stage: int
    recomputed: _CountOrNone = 0  # layers that are computed again in the backward pass
    layers: _Count  # of the model
    micro_batch: _Count
    accumulation: _Count
    fits: _Share
    bytes: float  # of the device that needs most
    tokens_per_s: PlannedRange  # over all devices


class PlannedDevices(_Foreseen):
    device: str  # the name of the kind, as `--on` has it
    nodes: _Count  # hosts
    per_node: _Count  # devices of each host
    # Of the kind (`DeviceFigures` as JSON), which may come from a file of the user's
    figures: dict[str, Any] = Field(default_factory=dict)
    price: float | None = None  # of one device for one hour; None if it is not known
    memory: _Amount = 0.0  # bytes of one device
    usable: _Amount = 0.0  # of these, the bytes that a process may use
    host_memory: float | None = None  # bytes of the host that each rank may use; None if it is not known
    arms: tuple[PlannedArm, ...] = ()  # the table, fastest first, then those that do not fit, least memory first
    best: str = ""  # label of the answer's arm; empty if none fits
    # Why the speeds cannot be, with the rows, in a sentence. The table then has none, and no answer.
    contradiction: str = ""
    answer: str = ""  # a sentence
    # Sentences on what bounds memory and time of the answer, or of the arm that is nearest to fit
    why: tuple[str, ...] = ()
    # The smallest number of these devices on which it trains at all. None if there is none below the most that was
    # looked at.
    fewest: int | None = None
    counts: tuple[PlannedCount, ...] = ()  # the best arm by number of devices, ascending
    notes: tuple[str, ...] = ()  # sentences, such as a global batch that this number cannot divide
    layouts: tuple[PlannedLayout, ...] = ()  # the fastest that fit; empty if nothing asks for them

    @property
    def label(self) -> str:
        """As people type it, such as `a100-40gb:2x8`."""
        return f"{self.device}:{self.per_node}" if self.nodes == 1 else f"{self.device}:{self.nodes}x{self.per_node}"

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    @property
    def chosen(self) -> PlannedArm | None:
        return next((arm for arm in self.arms if arm.label == self.best), None) if self.best else None


# The whole training: its length, its hours and its price.

_LENGTH = re.compile(r"([\d_,]*\.?\d+(?:e\d+)?)\s*([kmbt]?)\s*(epoch|token|sample|step)s?", re.IGNORECASE)
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
GIVE_LENGTH = "--whole 3epochs, 2e9tokens, 500000samples or 10000steps"


@dataclass(frozen=True)
class TrainingLength:
    amount: float
    unit: str  # `epoch`, `token`, `sample` or `step`
    source: str  # what says so, in words

    def __str__(self) -> str:
        return f"{self.amount:,.12g} {self.unit}{'' if self.amount == 1 else 's'}"

    def samples(self, run: ForeseenRun, batch: int) -> float | None:
        """Of all devices together, if the program runs as in `run`; None if the run does not show it.

        `batch` is the user's global batch (samples).
        """
        if self.unit == "token":
            return self.amount / run.tokens if run.tokens else None
        if self.unit == "epoch":
            of_a_rank = run.program.get("samples_per_epoch")
            return self.amount * of_a_rank * run.replicas if of_a_rank else None
        return self.amount * (batch if self.unit == "step" else 1)


def read_length(text: str) -> TrainingLength:
    """Raises ValueError if `--whole` is no length."""
    found = _LENGTH.fullmatch(text.strip())
    amount = float(re.sub("[_,]", "", found[1])) * _TIMES[found[2].lower()] if found else 0.0
    if found is None or not 0 < amount < inf:
        raise ValueError(f'"{text}" is no length of a training: write {GIVE_LENGTH}')
    return TrainingLength(amount, found[3].lower(), "--whole")


TRAINING_HOURS = "Hours are those of optimizer steps. Starting, evaluating and saving come on top."


class TrainingRow(_Foreseen):
    """The whole training with one arm on a number of devices."""

    device: str  # the name of the kind
    devices: str  # as `PlannedDevices.label`
    count: _Count  # of devices
    label: str  # of the arm
    switches: dict[str, str] = Field(default_factory=dict)  # as `PlanArm` has them
    micro_batch: _Count
    accumulation: _Count
    fits: _Share
    hours: PlannedRange
    price: PlannedRange | None = None  # None if no price is known
    apart: Annotated[float, Field(ge=1)] = 1.0  # as `PlannedStep` has it
    is_other: bool = False  # whether it is another training: by its global batch, its tokens or its weights
    marks: tuple[str, ...] = ()  # why people look at it, such as `cheapest`. A row without any is only drawn.
    is_best: bool = False  # whether it is the answer

    @property
    def device_hours(self) -> PlannedRange:
        return self.hours.times(self.count)


class PlannedTraining(_Foreseen):
    """Hours and price of the whole training."""

    length: str = ""  # in words, with what says so
    within: float | None = None  # the hours in which it has to end; None if nothing asks for that
    rows: tuple[TrainingRow, ...] = ()  # cheapest or shortest first
    answer: str = ""  # sentences; empty if nothing was asked
    missing: str = ""  # why it is not known, with the remedy

    @property
    def in_time(self) -> set[str]:
        """The labels of devices on which it ends in time; empty if nothing asks for that."""
        return {row.devices for row in self.rows if self.within is not None and row.hours.value <= self.within}

    @property
    def shown(self) -> tuple[TrainingRow, ...]:
        return tuple(row for row in self.rows if row.marks)


class PlanRecord(_Foreseen):
    plan_id: str  # unique on this and other machines
    name: str  # the experiment's; plans and studies of one experiment share it
    command: tuple[str, ...] = ()  # what was typed, or the entrypoint of the YAML
    model_dir: str = ""  # the folder that it runs in, absolute
    # The user's DeepSpeed configuration, completed by the program
    ds_config: dict[str, Any] = Field(default_factory=dict)
    # Samples of an optimizer step, which all arms keep; None if they may change it
    train_batch_size: _Count | None = None
    parameters: _CountOrNone = 0  # of the whole model
    trainable: _CountOrNone = 0  # of these, the parameters that are trained
    tokens: _CountOrNone | None = None  # in a sample; None if the batches show none
    formats: tuple[str, ...] = ()  # number formats of the arithmetic
    program: dict[str, Any] = Field(default_factory=dict)  # findings about the program, as `ProgramProfile` has them
    devices: tuple[PlannedDevices, ...] = ()  # the plan for each kind and number, in the order of `--on`
    # Index in `devices` of the answer: cheapest tokens if all have prices, else the fastest. None if nothing fits.
    best: _CountOrNone | None = None
    whole: PlannedTraining | None = None  # None if nothing asks for it
    answer: str = ""  # the answer in a sentence
    best_command: str = ""  # to train with the answer; empty if there is none
    asks: tuple[Ask, ...] = ()  # of all runs
    notes: tuple[str, ...] = ()  # sentences for the reader
    stopped: str = ""  # why the program cannot be foreseen; empty if it was
    # Of ZeroTune, and of DeepSpeed, torch and others in the foreseen program
    versions: dict[str, str] = Field(default_factory=dict)
    started_at: _Amount = 0.0  # seconds since the epoch
    seconds: _Amount = 0.0  # of the whole plan
    shares: dict[str, float] = Field(default_factory=dict)  # seconds of each part of the planning, by name
    peak_bytes: _CountOrNone = 0  # the most memory of a process that foresaw

    @model_validator(mode="after")
    def _has_its_answer(self) -> "PlanRecord":
        if self.best is not None and self.best >= len(self.devices):
            raise ValueError(f"the answer is number {self.best} of {len(self.devices)} tables")
        if any(ask.count < 1 for ask in self.asks):
            raise ValueError("the program asked something less than once")
        return self

    @property
    def chosen(self) -> PlannedArm | None:
        return None if self.best is None else self.devices[self.best].chosen


@dataclass(frozen=True)
class PlanPaths(AnswerFolder):
    @property
    def record(self) -> Path:
        return self.root / "plan.json"

    @property
    def log(self) -> Path:
        return self.root / "plan.log"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run(self, name: str) -> Path:
        """The file of one foreseen run (`ForeseenRun` as compressed JSON)."""
        return self.runs / f"{name}.json.gz"


def write_run(path: Path, run: ForeseenRun) -> None:
    make_own_folder(path.parent)
    # The least compression. A run of a large model has a hundred thousand events.
    path.write_bytes(gzip.compress(json.dumps(run.to_json()).encode(), compresslevel=1))
    path.chmod(OWNERS_FILE)


def read_run(path: Path) -> ForeseenRun:
    return ForeseenRun.from_json(json.loads(gzip.decompress(path.read_bytes())))


# The arguments of a plan: the experiment, and the devices to foresee it on.


class PlanArguments(FrozenRecord):
    """The arguments of a plan, as the command line or a deployment gives them.

    Attributes:
        config_path: the experiment's YAML. Empty if a command is planned.
        command: the words of the command to plan, instead of an experiment's YAML.
        model: plan a Trainer program of the model of this config.json of transformers. It is written into the plan's
            folder. Words behind `--` are then its options, such as --length 4096 or --gradient_checkpointing.
        arg_mappings: the option or variable of the command that sets each DeepSpeed key.
        vary: the program's switches, by their places in the command, with the values to foresee. It is for a command. A
            YAML has them in the section `program` of `search_space`.
        model_dir: the model directory. For a command it is the working directory.
        on: plan for these devices, as NAME:NUMBER or NAME:HOSTSxNUMBER, such as h100-80gb:8 or a100-40gb:2x8. Default:
            those of this host.
        price: show what the training costs, from the price of one device for one hour: NAME=PRICE, such as
            h100-80gb=2.99.
        prices: read such prices from this file, YAML (`h100-80gb: 2.99`) or CSV (`h100-80gb,2.99`). Without `on` the
            plan is for up to 8 of each device in it.
        whole: show hours and price of a whole training of this length, such as 3epochs, 2e9tokens, 500000samples or
            10000steps. Default: what the Trainer or Lightning would do.
        within: name the cheapest devices on which the whole training ends within this many hours.
        devices: read more devices from this YAML file.
        zero_stages: plan these ZeRO stages.
        train_batch_size: give every configuration this global batch, in samples. Default: that of your configuration.
        free_batch: let the plan choose the global batch. This changes the training.
        layouts: name the best layouts of a decoder too, by formulas: groups of AutoTP and AutoEP and sizes of switches
            that have a `layout`, with each ZeRO stage and each checkpointing that the program can have.
        max_micro_batch: consider no micro-batch size above this one, in samples. Default: what fits.
        memory_headroom: leave this share of a device's memory free.
        deadline: end a foreseen run that has not made its two optimizer steps within this many seconds. They include
            the way to the DeepSpeed engine.
        max_processes: foresee at most this many configurations at once. Default: one for each core of this host.
        include: add files or folders that the code imports from outside the model directory.
    """

    config_path: Path | None = None
    command: tuple[str, ...] = ()
    model: Path | None = None
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    vary: dict[str, Any] = Field(default_factory=dict)
    model_dir: Path
    on: tuple[str, ...] = ()
    price: tuple[str, ...] = ()
    prices: Path | None = None
    whole: str | None = None
    within: Annotated[float, Field(gt=0)] | None = None
    devices: Path | None = None
    zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES  # type: ignore[assignment]
    train_batch_size: PositiveInt | None = None
    free_batch: bool = False
    layouts: bool = False
    max_micro_batch: PositiveInt | None = None
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    deadline: Annotated[float, Field(gt=0)] = 300.0
    max_processes: PositiveInt | None = None
    include: tuple[Path, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _all_stages_if_none_is_named(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.get("zero_stages"):
            given = {name: value for name, value in given.items() if name != "zero_stages"}
        if isinstance(given, dict) and given.get("model") is not None:
            # Its program has a folder of its own.
            return {**given, "model_dir": given.get("model_dir") or Path(given["model"]).parent}
        return given

    @field_validator("whole")
    @classmethod
    def _is_a_length(cls, given: str | None) -> str | None:
        if given is not None:
            read_length(given)
        return given

    @model_validator(mode="after")
    def _has_something_to_plan(self) -> "PlanArguments":
        if (self.config_path is None) != bool(self.command or self.model):
            raise ValueError("expected one of config_path, command and model")
        if self.vary and not (self.command or self.model):
            raise ValueError("vary is for a command: a YAML has its switches in search_space, section program")
        if self.free_batch and self.train_batch_size is not None:
            raise ValueError("--train-batch-size and --free-batch exclude each other")
        return self


# The foreseen runs of a plan's arms, read from its folder after the plan has ended.


def kept_runs(devices: PlannedDevices, paths: PlanPaths, label: str = "") -> dict[str, ArmRuns]:
    """The runs of the arms of some devices (of the one with `label`, if that is given), by the arm's label.

    An arm that was run at one size grows as another one does, as in the plan. Arms whose runs are not in the folder are
    left out. Raises InputError if a run's file is damaged.
    """
    whole = [arm for arm in devices.arms if arm.runs and all(paths.run(name).is_file() for name in arm.runs)]
    wanted = [arm for arm in whole if label in ("", arm.label)]
    runs = {name: read_kept_run(paths.run(name)) for name in {name for arm in wanted for name in arm.runs}}
    pairs = [arm.runs for arm in whole if len(arm.runs) > 1]
    growths: dict[tuple[tuple[str, str], ...], Growth | None] = {}
    for arm in wanted:
        switches = switch_key(arm.knobs)
        if len(arm.runs) > 1 or runs[arm.runs[0]].stopped or switches in growths:
            continue
        # Other switches may keep other activations.
        alike = (other.runs[:2] for other in whole if len(other.runs) > 1 and switch_key(other.knobs) == switches)
        grown = (growth_between(*(runs.get(name) or read_kept_run(paths.run(name)) for name in pair)) for pair in alike)
        growths[switches] = next((each for each in grown if each is not None), None)
    found = (_of_arm(arm, paths, runs, growths.get(switch_key(arm.knobs)), is_of_one_size=not pairs) for arm in wanted)
    return {each.arm.label: each for each in with_common_loading(list(found))}


def wider_runs(arm: PlannedArm, paths: PlanPaths) -> list[Path]:
    """The files of an arm's runs on another number of ranks, at its small micro-batch."""
    if not arm.runs:
        return []
    small = arm.runs[0].rpartition("-of")[0]
    return [file for file in sorted(paths.runs.glob(f"{small}-of*.json.gz")) if file != paths.run(arm.runs[0])]


def _of_arm(
    arm: PlannedArm, paths: PlanPaths, runs: Mapping[str, ForeseenRun], growth: Growth | None, is_of_one_size: bool
) -> ArmRuns:
    small = with_switches(runs[arm.runs[0]], arm.knobs)
    large = with_switches(runs[arm.runs[1]], arm.knobs) if len(arm.runs) > 1 else None
    if large is None and growth is not None and not small.stopped and growth.micro_batch != small.micro_batch:
        large = growth.of_another_arm(small)
    if is_of_one_size:
        # The program has batches of one size, whatever size was asked for.
        small = replace(small, micro_batch=arm.micro_batch)
    others = (read_kept_run(file) for file in wider_runs(arm, paths))
    wider = next((run for run in others if not run.stopped), None)
    return ArmRuns(PlanArm(arm.label, arm.knobs, arm.is_own, arm.switches), small, large, wider, arm.runs)


def read_kept_run(file: Path) -> ForeseenRun:
    """Raises InputError if the file is damaged."""
    try:
        return read_run(file)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        raise InputError(
            "this foreseen run is damaged or of another version.", where=str(file), remedy="Make the plan again."
        ) from None


# How far off a plan was: what it foresaw for the trials of a study, beside what they measured.

_RIGHT = 0.005


class PlannedTrial(FrozenRecord):
    number: int  # of the trial
    label: str  # of its arm, such as `z3-offload-optimizer`
    micro_batch: int  # samples
    memory: float  # bytes, foreseen
    measured_memory: float | None = None  # bytes on the rank that took most. None if the trial did not complete.
    samples_per_s: float | None = None  # foreseen, over all devices. None if the plan is for other devices.
    low: float | None = None  # the lower end of its 90 % interval
    high: float | None = None  # the upper end
    measured_samples_per_s: float | None = None  # None if the trial did not complete

    @property
    def memory_off(self) -> float | None:
        """The foreseen memory's error, as a share of the measured one. None if nothing was measured."""
        return None if not self.measured_memory else self.memory / self.measured_memory - 1

    @property
    def speed_off(self) -> float | None:
        """The foreseen speed's error, as a share of the measured one. None if there is no pair."""
        if not self.samples_per_s or not self.measured_samples_per_s:
            return None
        return self.samples_per_s / self.measured_samples_per_s - 1


class PlannedTrials(FrozenRecord):
    plan_id: str  # of the plan
    devices: str  # that it was for, such as `h100-80gb:8`
    is_here: bool = False  # whether the study ran on devices of that kind, so that speeds can be compared
    of_steps: bool = False  # whether memory is that of the steps above initialisation (CPU), not the peak
    trials: tuple[PlannedTrial, ...] = ()  # in the order of their numbers

    @classmethod
    def in_file(cls, file: Path) -> "PlannedTrials | None":
        """Returns what a study has kept; None if it has no plan, or none of its trials has ended."""
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @property
    def memory_errors(self) -> list[float]:
        return [abs(trial.memory_off) for trial in self.trials if trial.memory_off is not None]

    @property
    def speed_error(self) -> float | None:
        """The middle error of the speeds, as a share: 0.22 is 22 % too fast. None if no speed can be compared."""
        found = [log(1 + trial.speed_off) for trial in self.trials if trial.speed_off is not None]
        return exp(median(found)) - 1 if found else None

    @property
    def sentence(self) -> str:
        errors, speed = self.memory_errors, self.speed_error
        if not errors and speed is None:
            return "No trial that the plan foresaw has completed, so nothing shows how far off it was."
        said = []
        if errors:
            worst = f" (worst {_shown(max(errors))})" if len(errors) > 1 else ""
            said.append(f"{_shown(median(errors))} off in memory{' at the median' if worst else ''}{worst}")
        if speed is not None:
            said.append(
                "right in speed"
                if abs(speed) < _RIGHT
                else f"{_shown(abs(speed))} too {'fast' if speed > 0 else 'slow'}"
            )
        found = f"The plan was {' and '.join(said)}."
        if self.is_here:
            return found
        return f"{found} It was for {self.devices}, which this host does not have, so speeds are not compared."

    def document(self) -> dict[str, Any]:
        return {"sentence": self.sentence, **self.model_dump(mode="json")}


def _shown(share: float) -> str:
    return percent(round(share, 2)) if share >= _RIGHT else "under 1 %"
