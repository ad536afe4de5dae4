"""The terms of the catalogue: when a knob has an effect."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerotune.trial_lib.deepspeed_config.layout import (
    AUTOEP,
    AUTOTP,
    LAYOUTS,
    PROGRAM,
    SEQUENCE,
    Layout,
    ModelShape,
    Replicas,
)
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.deepspeed_config.rules import broken_rules
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.records.switches import is_switch, place_of
from zerotune.trial_lib.search.knobs import STAGE, get_knob, set_knob, withdrawn

Kind = Literal["switch", "count", "size", "share", "names"] | tuple[str, ...]
"""The kind of a knob's values: true or false, whole numbers from 0 or from 1 on, numbers from 0 to 1, lists of names,
words."""

CoarseSetting = Mapping[str, Any]
"""The coarse knobs of a candidate, by path, including the ZeRO stage."""


@dataclass(frozen=True)
class Surroundings:
    """The facts that decide which knobs have an effect, beside the coarse knobs."""

    device: str  # `cpu` or `cuda`
    slots: int  # devices of a trial
    replicas: int  # of the model with the user's configuration; fewer than slots if one is spread over several
    num_params: int  # parameters of the whole model
    trainable_num_params: int  # those that the optimizer may change
    base_config: Mapping[str, Any] = field(default_factory=dict)  # the user's DeepSpeed configuration
    hosts: int = 1  # machines of a trial
    pipeline: bool = False  # whether the model is a pipeline
    deepspeed: str = ""  # the version of DeepSpeed that the ranks have; empty if it is not known
    program: ProgramProfile = field(default_factory=ProgramProfile)  # what the profile trial has found of the code
    shape: ModelShape = field(default_factory=ModelShape)  # the numbers of the model that groups of ranks divide

    def replicas_of(self, settings: Mapping[str, Any]) -> int:
        """Returns the model replicas of a candidate, by its knobs, its coarse setting or its complete configuration."""
        return Replicas(self.slots, self.replicas, self.base_config).of(settings)

    def own(self, path: str) -> Any:
        """Returns the value in the user's configuration; None if it leaves the setting to DeepSpeed."""
        value = get_knob(self.base_config, path)
        return None if value == "auto" and not is_switch(path) else value

    def own_at(self, stage: int, path: str) -> Any:
        """Returns the value that `own` returns, as far as candidates of a stage keep it."""
        for section, neutral in withdrawn(stage, self.base_config).items():
            whole = f"zero_optimization.{section}"
            if path == whole or (neutral is None and path.startswith(f"{whole}.")):
                return neutral
        return self.own(path)


ValuesOf = Callable[[Surroundings, Any], tuple[Any, ...]]
"""The values to try without a request, best guess first, from the surroundings and the user's value or None."""


STAGE_1_2, STAGE_3 = "zero/stage_1_and_2.py", "zero/stage3.py"
"""The files below `deepspeed/runtime` that most effects name as their source."""


def switch(first: bool) -> ValuesOf:
    """Returns both values of a switch: the user's first, else the given one."""
    return lambda here, own: (first, not first) if own is None else (bool(own), not own)


def clamped(first: int, others: Iterable[int], most: int) -> tuple[int, ...]:
    """Returns the sizes, capped at `most` and without duplicates."""
    return tuple(dict.fromkeys(min(int(elements), most) for elements in (first, *others)))


def read_at(stages: Iterable[int]) -> str:
    """Returns the ZeRO stages at which a knob has an effect, in words that follow "has no effect: "."""
    return f"DeepSpeed reads it at ZeRO stage {' and '.join(map(str, sorted(set(stages))))} only"


@dataclass(frozen=True)
class Effect:
    """Circumstances in which DeepSpeed reads a knob."""

    source: str  # the place in `deepspeed/runtime`
    stages: tuple[int, ...] = (0, 1, 2, 3)  # ZeRO stages
    devices: tuple[str, ...] = ("cpu", "cuda")  # of the ranks
    replicas: int = 1  # the least number of model replicas
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # by path: coarse knobs have one of the values
    unless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # by path: coarse knobs have none of these
    values: tuple[Any, ...] | None = None  # the values with an effect; None for all
    holds: Callable[[Surroundings], bool] | None = None  # whether further conditions hold
    otherwise: str = ""  # the message if they do not, in words that follow "has no effect: "
    candidates: ValuesOf | None = None  # the values that a search tries by itself; None if only a request varies it

    def lacks(self, setting: CoarseSetting, here: Surroundings, value_of: Callable[[str], Any]) -> tuple[int, str]:
        """Returns the missing condition, as (how near it came, message); (9, "") if none is missing."""
        if here.device not in self.devices:
            return 0, "it takes an accelerator" if self.devices == ("cuda",) else "it takes a CPU"
        if setting[STAGE] not in self.stages:
            return 1, read_at(self.stages)
        if self.holds is not None and not self.holds(here):
            return 2, self.otherwise
        replicas = here.replicas_of(setting)
        if replicas < self.replicas:
            return 3, f"it takes {self.replicas} replicas of the model or more, here is {replicas}"
        for path, values in self.when.items():
            if value_of(path) not in values:
                return 4, f"it takes {path} to be {' or '.join(map(shown, values))}"
        for path, values in self.unless.items():
            if value_of(path) in values:
                return 4, f"it takes {path} not to be {' or '.join(map(shown, values))}"
        return 9, ""


@dataclass(frozen=True)
class KnownKnob:
    kind: Kind  # the kind of its values
    effects: tuple[Effect, ...]  # the circumstances in which it has an effect
    default: Any = None  # DeepSpeed's own value; None if it depends, or if nothing uses it
    is_coarse: bool = False  # whether it decides memory or mathematics, and so the arm of a candidate
    changes_mathematics: bool = False  # whether another value trains another way; then only a request varies it
    since: str = ""  # the first version of DeepSpeed that has it
    word: str = ""  # the word for a fine knob in a candidate's name. Empty for the last part of its path.


def shown(value: Any) -> str:
    """Returns a value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def has_version(version: str, since: str) -> bool:
    """Returns whether a version of DeepSpeed is at least another. An unknown version counts as new enough."""
    return not version or not since or _numbers(version) >= _numbers(since)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


# The layout: how many ranks hold one replica of the model together.

_IMPOSSIBLE = (
    "undivided_devices",
    "undivided_heads",
    "unshared_heads",
    "unshared_tokens",
    "empty_stages",
    "undivided_experts",
    "pipeline_with_zero_2_or_3",
)


def is_layout(path: str, here: Surroundings) -> bool:
    """Returns whether a knob is the size of groups, by its path: of DeepSpeed, or a switch that the user calls so."""
    kinds = here.base_config.get(LAYOUTS) or {}
    return path in (AUTOTP, SEQUENCE, AUTOEP) or (is_switch(path) and place_of(path) in kinds)


def undivided(path: str, size: Any, here: Surroundings) -> str:
    """Returns why groups of a size are not tried by themselves; empty if they divide devices and model."""
    alone: dict[str, Any] = {LAYOUTS: here.base_config.get(LAYOUTS) or {}}
    set_knob(alone, path, size)
    return next(iter(_reasons(alone, here)), "")


def undivided_together(knobs: Mapping[str, Any], here: Surroundings) -> str:
    """Returns why the groups of some knobs are not tried together; empty if they are, or if they are the user's."""
    kinds = here.base_config.get(LAYOUTS) or {}
    base = Layout.of(here.base_config)
    if base.changed(knobs, kinds) == base:
        return ""
    own = {PROGRAM: here.base_config.get(PROGRAM) or {}, LAYOUTS: kinds}
    for section in ("tensor_parallel", "expert_parallel", SEQUENCE):
        if section in here.base_config:
            own[section] = here.base_config[section]
    return next(iter(_reasons(overwrite_deepspeed_config(own, copy.deepcopy(dict(knobs))), here)), "")


def _reasons(config: Mapping[str, Any], here: Surroundings) -> Iterable[str]:
    broken = broken_rules(config, "cpu", None, None, slots=here.slots, shape=here.shape)
    return (rule.reason for rule in broken if rule.name in _IMPOSSIBLE)
