"""Candidates, sweeps of them, and the purposes of trials."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PositiveInt
from pydantic_core import CoreSchema, core_schema

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    config_hash,
    overwrite_deepspeed_config,
)
from zerotune.trial_lib.records.switches import deepspeed_part, switches_of

# A longer integer is nothing that ZeroTune has written. No float and no array can hold it.
_LARGEST = 2**63 - 1

Seconds = Annotated[float, Field(gt=-(2.0**37), lt=2.0**37, allow_inf_nan=False)]
"""A duration, or seconds since the epoch, that a calendar can show."""


def _bounded(schema: Any) -> Any:
    """A schema of pydantic's whose integers have at most 64 bits, because a file that is read back may hold any."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for part in parts:
        _bounded(part)
    if isinstance(schema, dict) and schema.get("type") == "int":
        if "gt" not in schema:
            schema.setdefault("ge", -_LARGEST)
        if "lt" not in schema:
            schema.setdefault("le", _LARGEST)
    return schema


_USERS_OWN = ("ds_config", "settled")  # keys of a configuration, in which DeepSpeed takes any integer


def within_bounds(plain: Any) -> Any:
    """For a dataclass that is read back, as `FrozenRecord` does it. ValueError: an integer has more than 64 bits."""
    if isinstance(plain, dict):
        parts = [value for key, value in plain.items() if key not in _USERS_OWN]
    else:
        parts = plain if isinstance(plain, list) else []
    for part in parts:
        within_bounds(part)
    if isinstance(plain, int) and abs(plain) > _LARGEST:
        raise ValueError("an integer of more than 64 bits is nothing that ZeroTune has written")
    return plain


class FrozenRecord(BaseModel):
    """A record that does not change once it is made. It refuses unknown keys, and integers of more than 64 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _bounded(handler(source))


class Candidate(FrozenRecord):
    """One setting of all knobs. Candidates that differ only in the micro-batch size belong to one family."""

    # The overrides other than the batch, in the DeepSpeed configuration's own shape, such as `{"zero_optimization":
    # {"stage": 2}}`. A section `program` has the switches of the program, by their places.
    knobs: dict[str, Any] = Field(default_factory=dict)
    micro_batch_size: PositiveInt  # samples that a rank takes in one forward pass
    gradient_accumulation_steps: PositiveInt = 1  # micro-batches in one optimizer step
    slots: PositiveInt = 1  # devices that the trial takes
    data_parallel_size: PositiveInt | None = None  # model replicas; None before the profile has counted them

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that this candidate sets: in the user's DeepSpeed configuration, and in the program."""
        batch: dict[str, Any] = {MICRO_BATCH: self.micro_batch_size, ACCUMULATION: self.gradient_accumulation_steps}
        if self.data_parallel_size is not None:
            batch[TRAIN_BATCH] = self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size
        return {**self.knobs, **batch}

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """The settings that this candidate sets in the user's DeepSpeed configuration (`overwrite_deepspeed_args`)."""
        return deepspeed_part(self.settings)

    @cached_property
    def switches(self) -> dict[str, Any]:
        return switches_of(self.knobs)

    @cached_property
    def family(self) -> str:
        """Eight hexadecimal digits that are the same for candidates that differ only in the micro-batch size."""
        rest = json.dumps([self.knobs, self.gradient_accumulation_steps, self.slots], sort_keys=True)
        return hashlib.sha256(rest.encode()).hexdigest()[:8]

    @property
    def key(self) -> tuple[str, int]:
        return self.family, self.micro_batch_size

    @property
    def zero_stage(self) -> int | None:
        # A candidate of a damaged study may have anything there.
        section = self.knobs.get("zero_optimization")
        stage = section.get("stage") if isinstance(section, dict) else None
        return stage if isinstance(stage, int) else None

    @property
    def label(self) -> str:
        """A short name, such as `z2-mbs16`. In a study, `CandidateNames` distinguishes candidates that share it."""
        size = f"mbs{self.micro_batch_size}"
        return size if self.zero_stage is None else f"z{self.zero_stage}-{size}"

    def complete(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings merged into the user's. A section `program` stays, which DeepSpeed does not read."""
        return overwrite_deepspeed_config(base, self.settings)

    def config_hash(self, base: Mapping[str, Any]) -> str:
        return config_hash(self.complete(base))


@dataclass(frozen=True)
class Sweep:
    """Candidates that differ only in the batch. One process group measures them one after another. The group ends
    before a size that it predicts not to fit. Each size that it measures is a trial.
    """

    candidates: tuple[Candidate, ...]  # in ascending order of their micro-batch sizes. The first is known to fit.
    # The most bytes that one more sample may take on a device. It predicts the second size; measurements
    # predict the later ones.
    bytes_per_sample: float
    headroom: float  # share of the memory left after initialisation that is to stay free


class Withdrawal(str, Enum):
    """Why a size of a sweep was not measured."""

    MEMORY = "memory"
    NOT_REPEATABLE = "not_repeatable"
    ENDED = "ended"


YOURS = "yours"  # the short name of the user's configuration


class Purpose(str, Enum):
    """Why a trial runs."""

    PROFILE = "profile"
    SUBMITTED = "submitted"
    SEARCH = "search"
    CONFIRM = "confirm"
    RECORD = "record"

    def label(self, name: str) -> str:
        """`name` is the candidate's in the study. The user's own has one name, whatever a trial of it is for."""
        if self is Purpose.CONFIRM:
            return f"confirm-{name}"
        return "profile" if self is Purpose.PROFILE else YOURS if self is Purpose.SUBMITTED else name


# A field that accepts the names in a table. Prefect's form offers them as a choice.


@dataclass(frozen=True, eq=False)
class NameOf:
    """Makes a `str` field take the names of a table: `Annotated[str, NameOf("metric", SEARCH_METRICS)]`. The table is
    read when the field is. A new record in it is accepted at once.
    """

    what: str  # the field, as an error calls it
    table: Mapping[str, Any]  # the records by name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.table)}

    def _check(self, name: str) -> str:
        if name not in self.table:
            raise ValueError(f"the {self.what} must be one of {', '.join(self.table)} but is {name!r}")
        return name
