"""The search space: arms, which decide memory and mathematics, and the fine knobs that vary within each.

Pure: standard library only.
"""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[int, ...] = (0, 1, 2, 3)
STAGE = "zero_optimization.stage"

# What goes with another setting, which an arm's label names.
_UNNAMED = ("nvme_path", "zero_allow_untested_optimizer")
# What has an effect only from some stage on, and the value that withdraws it below: DeepSpeed would accept it there
# and do nothing (see `rules`).
_NEUTRAL_BELOW: dict[str, tuple[int, Any]] = {
    "offload_optimizer": (1, None),
    "offload_param": (3, None),
    "zero_hpz_partition_size": (3, 1),
    "zero_quantized_weights": (3, False),
    "zero_quantized_nontrainable_weights": (3, False),
    "zero_quantized_gradients": (3, False),
}

# What DeepSpeed does where a configuration leaves a knob open, for those of which the best guess may be another value
# (deepspeed/runtime/zero/config.py, 0.19.8).
LEFT_OPEN: Mapping[str, Any] = {"zero_optimization.contiguous_gradients": True}

BUCKET_ELEMENTS = tuple(factor * 10**power for power in (6, 7, 8, 9) for factor in (1, 5))


@dataclass(frozen=True)
class Knob:
    """One DeepSpeed setting that a search may vary.

    Attributes:
        path: where it stands in the DeepSpeed configuration, such as `zero_optimization.reduce_bucket_size`.
        values: what it may be, without repetition, the best guess first where the space says so.
    """

    path: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Arm:
    """One setting of the coarse knobs, which decide memory and mathematics, with the fine knobs to vary within it.

    A lineage of an arm is known by an index below `size`; 0 has each fine knob at its first value.

    Attributes:
        knobs: the coarse knobs, in the DeepSpeed configuration's own shape, with the ZeRO stage.
        fine: the knobs that vary within the arm.
    """

    knobs: Mapping[str, Any]
    fine: tuple[Knob, ...] = ()

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage: int = self.knobs["zero_optimization"]["stage"]
        return stage

    @cached_property
    def label(self) -> str:
        """A short name for people, such as `z2` or `z3-offload-optimizer`: what is switched off is left out."""
        names = (coarse_word(path, value) for path, value in leaves(self.knobs) if path != STAGE)
        return "-".join([f"z{self.stage}", *filter(None, names)])

    @cached_property
    def size(self) -> int:
        """How many distinct lineages the arm has."""
        return prod(len(knob.values) for knob in self.fine)

    def lineage(self, index: int) -> dict[str, Any]:
        """Returns the knobs of one lineage, in the DeepSpeed configuration's own shape.

        Args:
            index: from 0 to `size` - 1.
        """
        lineage = copy.deepcopy(dict(self.knobs))
        for knob in self.fine:
            index, position = divmod(index, len(knob.values))
            set_knob(lineage, knob.path, knob.values[position])
        return lineage

    def index(self, knobs: Mapping[str, Any]) -> int | None:
        """Returns which lineage some knobs are (the inverse of `lineage`); None if they are none of this arm."""
        index, weight = 0, 1
        for knob in self.fine:
            value = get_knob(knobs, knob.path)
            if value not in knob.values:
                return None
            index += weight * knob.values.index(value)
            weight *= len(knob.values)
        return index if self.lineage(index) == knobs else None

    def with_fine(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the knobs with some fine ones set, by path; the others have their first value.

        Raises:
            KeyError: a path is that of no fine knob of this arm.
        """
        if unknown := values.keys() - {knob.path for knob in self.fine}:
            raise KeyError(f"no fine knob of {self.label}: {', '.join(sorted(unknown))}")
        knobs = self.lineage(0)
        for path, value in values.items():
            set_knob(knobs, path, value)
        return knobs


@dataclass(frozen=True)
class SearchSpace:
    """The lineages a search may draw from: those of some arms.

    A lineage is known by its arm and its index there, or by its ZeRO stage and an index below `size(stage)`; its
    micro-batch size is the search's to choose.

    Attributes:
        arms: in the order of the ZeRO stages; no two have the same coarse knobs.
    """

    arms: tuple[Arm, ...]

    @classmethod
    def of_arms(cls, arms: Iterable[Arm]) -> "SearchSpace":
        """Returns the space of some arms, in ascending order of their stages."""
        return cls(tuple(sorted(arms, key=lambda arm: arm.stage)))

    @classmethod
    def for_model(
        cls, zero_stages: Iterable[int], num_params: int, base_config: Mapping[str, Any] | None = None
    ) -> "SearchSpace":
        """Returns dsat's space for a model: one arm a stage, in ascending order.

        A bucket larger than the model does what one of the model's size does, yet DeepSpeed allocates it whole: bucket
        sizes are clamped to the model's, and what becomes equal is one value.

        Args:
            zero_stages: the stages that may be used, each from 0 to 3.
            num_params: parameters of the whole model.
            base_config: the user's DeepSpeed configuration.
        """
        buckets = clamped_buckets(num_params)
        return cls(
            tuple(
                Arm(
                    {"zero_optimization": {"stage": stage, **withdrawn(stage, base_config or {})}},
                    _knobs_of_stage(stage, buckets),
                )
                for stage in sorted(set(zero_stages))
            )
        )

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The allowed ZeRO stages, ascending."""
        return tuple(sorted({arm.stage for arm in self.arms}))

    def size(self, stage: int) -> int:
        """Returns how many distinct lineages a stage has."""
        return sum(arm.size for arm in self.arms if arm.stage == stage)

    def lineage(self, stage: int, index: int) -> dict[str, Any]:
        """Returns the knobs of one lineage, in the DeepSpeed configuration's own shape.

        Args:
            stage: an allowed ZeRO stage.
            index: from 0 to `size(stage)` - 1.

        Raises:
            IndexError: the stage has no such lineage.
        """
        left = index
        for arm in self.arms:
            if arm.stage != stage:
                continue
            if left < arm.size:
                return arm.lineage(left)
            left -= arm.size
        raise IndexError(f"stage {stage} has no lineage {index}")

    def index(self, lineage: Mapping[str, Any]) -> int | None:
        """Returns which lineage of its stage some knobs are (the inverse of `lineage`); None if they are of none."""
        before = 0
        for arm in self.arms:
            if arm.stage != get_knob(lineage, STAGE):
                continue
            index = arm.index(lineage)
            if index is not None:
                return before + index
            before += arm.size
        return None

    def draw(self, stage: int, rng: random.Random) -> dict[str, Any]:
        """Returns the knobs of a lineage of a stage, each as likely as any other."""
        return self.lineage(stage, rng.randrange(self.size(stage)))


def clamped_buckets(num_params: int) -> tuple[int, ...]:
    """Returns the bucket sizes worth trying for a model, in elements, ascending."""
    # DeepSpeed refuses an odd allgather bucket ("must be a multiple of nccl_start_alignment_factor, 2").
    most = num_params + num_params % 2
    return tuple(sorted({min(elements, most) for elements in BUCKET_ELEMENTS}))


def withdrawn(stage: int, base_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of the user's own ZeRO section has no effect at a stage, each with its neutral value."""
    own = base_config.get("zero_optimization")
    own = own if isinstance(own, Mapping) else {}  # DeepSpeed's old way to write stage 1 is `true`
    return {key: value for key, (first, value) in _NEUTRAL_BELOW.items() if stage < first and key in own}


def set_knob(config: dict[str, Any], path: str, value: Any) -> None:
    """Sets one setting of a configuration, by its dotted path; missing sections are made."""
    *sections, key = path.split(".")
    for section in sections:
        inner = config.get(section)
        if not isinstance(inner, dict):
            inner = config[section] = {}
        config = inner
    config[key] = value


def get_knob(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """Returns one setting of a configuration, by its dotted path; the default where it is not set."""
    value: Any = config
    for key in path.split("."):
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


def _knobs_of_stage(stage: int, buckets: tuple[int, ...]) -> tuple[Knob, ...]:
    switches = (True, False)
    knobs = []
    if stage >= 1:
        knobs.append(Knob("zero_optimization.reduce_bucket_size", buckets))
    if stage in (1, 2):  # stage 3 never reads it: varied there, it would measure noise
        knobs.append(Knob("zero_optimization.allgather_bucket_size", buckets))
    if stage >= 2:
        knobs.append(Knob("zero_optimization.overlap_comm", switches))
        knobs.append(Knob("zero_optimization.reduce_scatter", switches))
        knobs.append(Knob("zero_optimization.contiguous_gradients", switches))
    return tuple(knobs)


def coarse_word(path: str, value: Any) -> str:
    """Returns the word for a coarse setting in an arm's label. It is empty for a setting that is off."""
    section, _, key = path.rpartition(".")
    section = section.rpartition(".")[2]
    if value in (None, False, "none") or key in _UNNAMED or (key == "zero_hpz_partition_size" and value == 1):
        return ""
    if key == "device":
        return section.replace("_", "-") + ("" if value == "cpu" else f"-{value}")
    if value is True:
        return (section if key == "enabled" else key).replace("_", "-")
    return f"{key.replace('_', '-')}={value}"
