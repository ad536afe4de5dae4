"""How a trial ended, and what it measured."""

import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any

from pydantic import Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from zerotune.trial_lib.messages.measurement import Measured, ProgramProfile
from zerotune.trial_lib.records.candidate import FrozenRecord, NameOf, Purpose, Seconds, within_bounds
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


@dataclass(frozen=True, kw_only=True)
class TrialResult(Measured):
    """The complete record of one trial: what rank 0 has measured, and how the trial ran and ended."""

    trial_id: str  # the study's id and the trial's number; unique over all studies
    number: int  # the trial's number in its study
    purpose: Purpose  # why it ran
    name: str = ""  # the name of its candidate in the study, such as `z2-mbs16`.
    config_hash: str  # names the complete DeepSpeed configuration that ran
    outcome: Outcome  # how it ended
    reason: str = ""  # one sentence that a person can act on. Empty for a completed trial.
    failed_rank: int | None = None  # the one that failed first; None if none did
    from_outside: bool = False  # whether it was killed from outside, which says nothing about the candidate
    rounding: float | None = None  # as `ProbeSettings` has it
    swept: bool = False  # whether the ranks had measured other micro-batch sizes before this one
    phases: dict[str, Seconds] = field(default_factory=dict)  # as `Measured` has them, within a calendar's bounds
    logs: list[str] = field(default_factory=list)  # paths of the ranks' logs, in rank order
    started_at: Seconds = 0.0  # seconds since the epoch. The trial had its slots then.
    waited: WaitedForSlots | None = None  # its wait for slots before that. None if it had them at once.
    devices: list[TrialDevice] = field(default_factory=list)  # in rank order, of one host; empty if unknown
    # Why ops of DeepSpeed that the search's arms need cannot be built, by their builders' names (only in a profile
    # trial)
    unbuildable: dict[str, str] = field(default_factory=dict)
    # The disks to which arms may swap (only in a profile trial). Empty if they are not known, as on several
    # hosts.
    swap_disks: list[SwapDisk] = field(default_factory=list)

    @classmethod
    def of(cls, measured: Measured, **more: Any) -> "TrialResult":
        """The result of a trial whose rank 0 has measured that, with the other fields, or some in its place."""
        return cls(**{**{each.name: getattr(measured, each.name) for each in fields(Measured)}, **more})

    @property
    def had_company(self) -> bool:
        return any(device.company for device in self.devices)

    @property
    def formats(self) -> tuple[str, ...]:
        return () if self.program is None else tuple(self.program.formats)

    @classmethod
    def from_json(cls, plain: Any) -> "TrialResult":
        """Raises ValidationError: it is damaged, or of a later version."""
        return _RESULT.validate_python(plain)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = _RESULT.dump_python(self, mode="json")
        return plain

    @classmethod
    def from_text(cls, text: str | bytes) -> "TrialResult":
        """Raises ValidationError: it is no JSON, damaged, or of a later version."""
        return _RESULT.validate_json(text)

    def to_text(self) -> str:
        return _RESULT.dump_json(self, indent=2).decode()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(within_bounds, handler(source))


_RESULT = TypeAdapter(TrialResult)
_PROGRAM = TypeAdapter(ProgramProfile)


def read_program(plain: Any) -> ProgramProfile:
    """The findings about a program that a rank has written as JSON. Raises ValidationError: they are damaged."""
    return _PROGRAM.validate_python(plain)


# The metrics that a search can optimise, one record each.


@dataclass(frozen=True)
class Metric:
    name: str  # as in `--metric`, the trial's record and MLflow
    unit: str  # for people
    smaller_is_better: bool = False  # the direction of the search
    # Whether the metric is the samples per second times a constant of the model. The intervals of two such metrics have
    # the same proportions.
    is_throughput: bool = False
    instead: str = ""  # the metric to go by if the model shows no figure for this one; empty if it always does
    # Its name with the unit for MLflow, which shows bare numbers, and how much of it one of that unit is
    with_unit: str = ""
    of_unit: float = 1.0

    def better(self, value: float, than: float) -> bool:
        return value < than if self.smaller_is_better else value > than

    def shown(self, value: float | None) -> str:
        return "" if value is None else quantity(value, self.unit)


SEARCH_METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "FLOPS_per_gpu",
            "FLOP/s",
            is_throughput=True,
            instead="throughput",
            with_unit="TFLOPS_per_gpu",
            of_unit=1e12,
        ),
        Metric("throughput", "samples/s", is_throughput=True, with_unit="samples_per_s"),
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
