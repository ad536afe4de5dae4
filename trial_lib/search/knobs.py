"""The search space: arms, which decide memory and mathematics, and the fine knobs that vary within each.

Pure: standard library only.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from zerotune.trial_lib.messages.turned import is_by_rank, turned_word
from zerotune.trial_lib.records.switches import PROGRAM, is_option, is_switch, place_of, shown_switch, switches_of

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[int, ...] = (0, 1, 2, 3)
STAGE = "zero_optimization.stage"

# Settings that belong to another setting, which an arm's label names.
_UNNAMED = ("nvme_path", "zero_allow_untested_optimizer")
# Settings with an effect only from some stage on, and the value that withdraws them below. DeepSpeed would accept them
# there and do nothing (see `rules`).
_NEUTRAL_BELOW: dict[str, tuple[int, Any]] = {
    "offload_optimizer": (1, None),
    "offload_param": (3, None),
    "zero_hpz_partition_size": (3, 1),
    "zero_quantized_weights": (3, False),
    "zero_quantized_nontrainable_weights": (3, False),
    "zero_quantized_gradients": (3, False),
}

# DeepSpeed's defaults for knobs whose best guess may be another value (deepspeed/runtime/zero/config.py, 0.19.8).
LEFT_OPEN: Mapping[str, Any] = {"zero_optimization.contiguous_gradients": True}

BUCKET_ELEMENTS = tuple(factor * 10**power for power in (6, 7, 8, 9) for factor in (1, 5))


@dataclass(frozen=True)
class Knob:
    """One setting that a search may vary: of the DeepSpeed configuration, or a switch of the program."""

    # Its place in the DeepSpeed configuration, such as `zero_optimization.reduce_bucket_size`, or `program.` and the
    # place of a switch
    path: str
    values: tuple[Any, ...]  # its values, without repetition. The best guess is first if the space says so.


@dataclass(frozen=True)
class Arm:
    """One setting of the coarse knobs, which decide memory and mathematics, with the fine knobs that vary within it. A
    family of an arm has an index below `size`. Index 0 has each fine knob at its first value.
    """

    knobs: Mapping[str, Any]  # the coarse knobs, in the shape of the DeepSpeed configuration, with the ZeRO stage
    fine: tuple[Knob, ...] = ()  # the knobs that vary within the arm

    @property
    def stage(self) -> int:
        stage: int = self.knobs["zero_optimization"]["stage"]
        return stage

    @cached_property
    def label(self) -> str:
        """A short name, such as `z2` or `z3-offload-optimizer`, without settings that are off."""
        names = (coarse_word(path, value) for path, value in leaves(self.knobs) if path != STAGE)
        return "-".join([f"z{self.stage}", *filter(None, names)])

    @cached_property
    def size(self) -> int:
        return prod(len(knob.values) for knob in self.fine)

    def positions(self, index: int) -> list[tuple[Knob, int]]:
        """Returns for each fine knob the place of a family's value among its values."""
        positions = []
        for knob in self.fine:
            index, position = divmod(index, len(knob.values))
            positions.append((knob, position))
        return positions

    def family(self, index: int) -> dict[str, Any]:
        """Returns the knobs of one family, in the shape of the DeepSpeed configuration."""
        family = copy.deepcopy(dict(self.knobs))
        for knob, position in self.positions(index):
            set_knob(family, knob.path, knob.values[position])
        return family

    def index(self, knobs: Mapping[str, Any]) -> int | None:
        """Returns the family of some knobs (the inverse of `family`); None if they are not of this arm."""
        index, weight = 0, 1
        for knob in self.fine:
            value = get_knob(knobs, knob.path)
            if value not in knob.values:
                return None
            index += weight * knob.values.index(value)
            weight *= len(knob.values)
        return index if self.family(index) == knobs else None

    def with_fine(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Sets some fine knobs by path (any other is a `KeyError`). The rest have their first value."""
        if unknown := values.keys() - {knob.path for knob in self.fine}:
            raise KeyError(f"no fine knob of {self.label}: {', '.join(sorted(unknown))}")
        knobs = self.family(0)
        for path, value in values.items():
            set_knob(knobs, path, value)
        return knobs


@dataclass(frozen=True)
class SearchSpace:
    """The families that a search may draw from: those of some arms. A family has an arm and an index there, or a ZeRO
    stage and an index below `size(stage)`. The search chooses its micro-batch size.
    """

    arms: tuple[Arm, ...]  # in the order of the ZeRO stages. No two have the same coarse knobs.

    @classmethod
    def of_arms(cls, arms: Iterable[Arm]) -> "SearchSpace":
        return cls(tuple(sorted(arms, key=lambda arm: arm.stage)))

    @classmethod
    def for_model(
        cls, zero_stages: Iterable[int], num_params: int, base_config: Mapping[str, Any] | None = None
    ) -> "SearchSpace":
        """Returns dsat's space for a model: one arm for each stage, in ascending order. DeepSpeed allocates a whole
        bucket, although one larger than the model has the effect of the model's size. So bucket sizes are clamped to
        the model's, and equal ones are one value.
        """
        # DeepSpeed refuses an odd allgather bucket ("must be a multiple of nccl_start_alignment_factor, 2").
        most = num_params + num_params % 2
        buckets = tuple(sorted({min(elements, most) for elements in BUCKET_ELEMENTS}))
        zero = {stage: {"stage": stage, **withdrawn(stage, base_config or {})} for stage in sorted(set(zero_stages))}
        return cls(tuple(Arm({"zero_optimization": zero[stage]}, _knobs_of_stage(stage, buckets)) for stage in zero))

    @cached_property
    def coarse_switches(self) -> frozenset[str]:
        return frozenset(place for arm in self.arms for place in switches_of(arm.knobs))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({arm.stage for arm in self.arms}))

    def size(self, stage: int) -> int:
        return sum(arm.size for arm in self.arms if arm.stage == stage)

    def family(self, stage: int, index: int) -> dict[str, Any]:
        """Returns the knobs of one family of a stage. An index that it does not have is an `IndexError`."""
        left = index
        for arm in self.arms:
            if arm.stage != stage:
                continue
            if left < arm.size:
                return arm.family(left)
            left -= arm.size
        raise IndexError(f"stage {stage} has no family {index}")

    def index(self, family: Mapping[str, Any]) -> int | None:
        """Returns the family of some knobs in their stage (the inverse of `family`); None if they are of none."""
        found = self.locate(family)
        if found is None:
            return None
        number, index = found
        return sum(arm.size for arm in self.arms[:number] if arm.stage == self.arms[number].stage) + index

    def locate(self, knobs: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the number of the arm of some knobs, and their family there; None if they are of none."""
        for number, arm in enumerate(self.arms):
            if arm.stage == get_knob(knobs, STAGE) and (index := arm.index(knobs)) is not None:
                return number, index
        return None

    def locate_config(self, config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the family that a complete DeepSpeed configuration belongs to, as far as the space's knobs go. The
        arm that sets most of the configuration's coarse knobs is taken. A fine knob that the configuration leaves open
        counts as DeepSpeed's default. A fine knob at a value outside the space counts as the arm's best guess.
        """
        settings = [list(leaves(arm.knobs)) for arm in self.arms]
        described = [
            number
            for number, of_arm in enumerate(settings)
            if all(plain(get_knob(config, path)) == plain(value) for path, value in of_arm)
        ]
        if not described:
            return None
        number = max(described, key=lambda each: len(settings[each]))
        arm, shared = self.arms[number], {}
        for knob in arm.fine:
            own = get_knob(config, knob.path, LEFT_OPEN.get(knob.path))
            if own in knob.values:
                shared[knob.path] = knob.values[knob.values.index(own)]
        return number, arm.index(arm.with_fine(shared)) or 0


def withdrawn(stage: int, base_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of the user's ZeRO section without an effect at a stage, each with its neutral value."""
    own = base_config.get("zero_optimization")
    own = own if isinstance(own, Mapping) else {}  # `true` is DeepSpeed's old spelling of stage 1
    neutral = {key: value for key, (first, value) in _NEUTRAL_BELOW.items() if stage < first and key in own}
    offload = own.get("offload_optimizer")
    if stage in (1, 2) and isinstance(offload, Mapping) and "ratio" in offload:
        neutral["offload_optimizer"] = {"ratio": None}  # DeepSpeed refuses it there
    return neutral


def keys_of(path: str) -> list[str]:
    """Returns the keys of a setting from the top. The place of a program's switch is one key, whatever dots it has."""
    return [PROGRAM, place_of(path)] if is_switch(path) else path.split(".")


def set_knob(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets one setting of a configuration by its dotted path, and makes missing sections."""
    *sections, key = keys_of(path)
    for section in sections:
        inner = config.get(section)
        if not isinstance(inner, dict):
            inner = config[section] = {}
        config = inner
    config[key] = value


def get_knob(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Returns one setting of a configuration by its dotted path, or the default."""
    value: Any = config
    for key in keys_of(path):
        if not isinstance(value, Mapping) or key not in value:
            return default
        value = value[key]
    return value


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting of a configuration by its dotted path."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(value: Any) -> Any:
    """Returns a value. All values that switch a setting off, or leave it out, become None."""
    return None if value in (None, False, "none") or value == 0 else value


def _knobs_of_stage(stage: int, buckets: tuple[int, ...]) -> tuple[Knob, ...]:
    switches = (True, False)
    knobs = []
    if stage >= 1:
        knobs.append(Knob("zero_optimization.reduce_bucket_size", buckets))
    if stage in (1, 2):  # stage 3 never reads it, so a search would vary noise
        knobs.append(Knob("zero_optimization.allgather_bucket_size", buckets))
    if stage >= 2:
        knobs.append(Knob("zero_optimization.overlap_comm", switches))
        knobs.append(Knob("zero_optimization.reduce_scatter", switches))
        knobs.append(Knob("zero_optimization.contiguous_gradients", switches))
    return tuple(knobs)


def coarse_word(path: str, value: Any) -> str:
    """Returns the word for a coarse setting in an arm's label. It is empty for a setting that is off."""
    if is_switch(path):
        return switch_word(place_of(path), value)
    section, _, key = path.rpartition(".")
    section = section.rpartition(".")[2]
    if key == "autotp_size":
        return f"tp{value}"
    if value in (None, False, "none") or key in _UNNAMED or (key == "zero_hpz_partition_size" and value == 1):
        return ""
    if key == "device":
        return section.replace("_", "-") + ("" if value == "cpu" else f"-{value}")
    if value is True:
        return (section if key == "enabled" else key).replace("_", "-")
    return f"{key.replace('_', '-')}={value}"


def switch_word(place: str, value: Any) -> str:
    """Returns the word for a program's switch in names. It is empty for one that is as typed, or an option left out."""
    if is_by_rank(place):
        return turned_word(place, value)
    if value is None or (value is False and is_option(place)):
        return ""
    word = shown_switch(place, value)
    return word.lstrip("-").replace("_", "-") if is_option(place) else word
