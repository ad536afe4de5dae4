"""What it takes for a knob to have an effect: the terms of the catalogue.

Pure: standard library only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trial_lib.space.knobs import STAGE, get_knob

Kind = Literal["switch", "count"] | tuple[str, ...]
"""What a knob may be: true or false, a number from 0 on, or one of some words."""

CoarseSetting = Mapping[str, Any]
"""The coarse knobs that a candidate sets, by path, the ZeRO stage among them."""


@dataclass(frozen=True)
class Surroundings:
    """What decides which knobs have an effect, beside the coarse knobs.

    Attributes:
        device: `cpu` or `cuda`.
        slots: devices a trial takes.
        replicas: model replicas; fewer than the slots where a model is spread over several.
        num_params: parameters of the whole model.
        trainable_num_params: those that the optimizer may change.
        base_config: the user's DeepSpeed configuration.
        hosts: machines that a trial takes.
        pipeline: whether the model is a pipeline.
        reads_activation_checkpointing: whether the code configures DeepSpeed's activation checkpointing by the
            DeepSpeed configuration.
        deepspeed: the version of DeepSpeed that the ranks have; empty where it is not known.
        code_optimizer: the class of the optimizer that the code makes, as `optimizers` names it; empty where it makes
            none, or that is not known.
        by_accelerate: whether Accelerate hands that to DeepSpeed: it permits any under ZeRO.
        has_experts: whether the model has layers of DeepSpeed's mixture of experts.
        repeats_backward: whether the code calls backward more than once for one step of its engine.
    """

    device: str
    slots: int
    replicas: int
    num_params: int
    trainable_num_params: int
    base_config: Mapping[str, Any] = field(default_factory=dict)
    hosts: int = 1
    pipeline: bool = False
    reads_activation_checkpointing: bool = False
    deepspeed: str = ""
    code_optimizer: str = ""
    by_accelerate: bool = False
    has_experts: bool = False
    repeats_backward: bool = False

    def own(self, path: str) -> Any:
        """Returns what the user's configuration sets; None where it leaves that to DeepSpeed."""
        value = get_knob(self.base_config, path)
        return None if value == "auto" else value


ValuesOf = Callable[[Surroundings, Any], tuple[Any, ...]]
"""The values to try unasked, the best guess first, from the surroundings and the user's value (None without)."""


def read_at(stages: Iterable[int]) -> str:
    """Returns at which ZeRO stages a knob has an effect, to follow "has no effect: "."""
    return f"DeepSpeed reads it at ZeRO stage {' and '.join(map(str, sorted(set(stages))))} only"


@dataclass(frozen=True)
class Effect:
    """Circumstances in which DeepSpeed reads a knob.

    Attributes:
        source: where in `deepspeed/runtime`.
        stages: ZeRO stages.
        devices: of the ranks.
        replicas: model replicas at least.
        when: settings of coarse knobs, by path: each has one of the values.
        values: those that do something here; None for all.
        holds: whether what else it takes is there.
        otherwise: what to tell people if that is not, to follow "has no effect: ".
        candidates: the values that a search tries here unasked; None for a knob on request.
    """

    source: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    devices: tuple[str, ...] = ("cpu", "cuda")
    replicas: int = 1
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    values: tuple[Any, ...] | None = None
    holds: Callable[[Surroundings], bool] | None = None
    otherwise: str = ""
    candidates: ValuesOf | None = None

    def lacks(self, setting: CoarseSetting, here: Surroundings, value_of: Callable[[str], Any]) -> tuple[int, str]:
        """Returns what is missing for the effect, as (how near it came, what to tell people); (9, "") for nothing.

        Args:
            setting: the coarse knobs of a candidate.
            here: what else decides.
            value_of: what a coarse knob is in that candidate, set there or not.
        """
        if here.device not in self.devices:
            return 0, "it takes an accelerator" if self.devices == ("cuda",) else "it takes a CPU"
        if setting[STAGE] not in self.stages:
            return 1, read_at(self.stages)
        if self.holds is not None and not self.holds(here):
            return 2, self.otherwise
        if here.replicas < self.replicas:
            return 3, f"it takes {self.replicas} replicas of the model or more, here is {here.replicas}"
        for path, values in self.when.items():
            if value_of(path) not in values:
                return 4, f"it takes {path} to be {' or '.join(map(shown, values))}"
        return 9, ""


@dataclass(frozen=True)
class KnownKnob:
    """A knob of the catalogue.

    Attributes:
        kind: what its values are.
        effects: the circumstances in which it has one.
        default: DeepSpeed's own value; None where that depends, and for a knob of which nobody asks it.
        is_coarse: whether it decides memory or mathematics, and so which arm a candidate belongs to.
        since: the first version of DeepSpeed that has it.
        word: the word for a fine knob in a candidate's name. Empty for the last part of its path.
    """

    kind: Kind
    effects: tuple[Effect, ...]
    default: Any = None
    is_coarse: bool = False
    since: str = ""
    word: str = ""


def shown(value: Any) -> str:
    """Returns a value as YAML has it."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def has_version(version: str, since: str) -> bool:
    """Returns whether a version of DeepSpeed is at least another; one that is not known is taken to be."""
    return not version or not since or _numbers(version) >= _numbers(since)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())
