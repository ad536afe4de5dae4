"""The search space: which DeepSpeed settings a search varies at each ZeRO stage, and over which values."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

ZeroStage = Literal[0, 1, 2, 3]
ZERO_STAGES: tuple[int, ...] = (0, 1, 2, 3)

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

BUCKET_ELEMENTS = tuple(factor * 10**power for power in (6, 7, 8, 9) for factor in (1, 5))


@dataclass(frozen=True)
class Knob:
    """One DeepSpeed setting that a search may vary.

    Attributes:
        path: where it stands in the DeepSpeed configuration, such as `zero_optimization.reduce_bucket_size`.
        values: what it may be, without repetition.
    """

    path: str
    values: tuple[int | bool, ...]


@dataclass(frozen=True)
class SearchSpace:
    """The lineages a search may draw from: for each allowed ZeRO stage, every combination of its knobs' values.

    A lineage is known by its stage and an index below `size(stage)`; its micro-batch size is the search's to choose.

    Attributes:
        knobs: the knobs to vary, by allowed stage.
        withdrawn: what of the user's own configuration has no effect at a stage, by stage, with its neutral value.
    """

    knobs: Mapping[int, tuple[Knob, ...]]
    withdrawn: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def for_model(
        cls, zero_stages: Iterable[int], num_params: int, base_config: Mapping[str, Any] | None = None
    ) -> "SearchSpace":
        """Returns the space of the predecessor's dsat for a model, in ascending order of the stages.

        A bucket larger than the model does what one of the model's size does, yet DeepSpeed allocates it whole: bucket
        sizes are clamped to the model's, and what becomes equal is one value.

        Args:
            zero_stages: the stages that may be used, each from 0 to 3.
            num_params: parameters of the whole model.
            base_config: the user's DeepSpeed configuration.
        """
        # DeepSpeed refuses an odd allgather bucket ("must be a multiple of nccl_start_alignment_factor, 2").
        most = num_params + num_params % 2
        buckets = tuple(sorted({min(elements, most) for elements in BUCKET_ELEMENTS}))
        own = (base_config or {}).get("zero_optimization") or {}
        stages = sorted(set(zero_stages))
        return cls(
            {stage: _knobs_of_stage(stage, buckets) for stage in stages},
            {
                stage: {key: value for key, (first, value) in _NEUTRAL_BELOW.items() if stage < first and key in own}
                for stage in stages
            },
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """The allowed ZeRO stages."""
        return tuple(self.knobs)

    def size(self, stage: int) -> int:
        """Returns how many distinct lineages a stage has."""
        return prod(len(knob.values) for knob in self.knobs[stage])

    def lineage(self, stage: int, index: int) -> dict[str, Any]:
        """Returns the knobs of one lineage, in the DeepSpeed configuration's own shape.

        Args:
            stage: an allowed ZeRO stage.
            index: from 0 to `size(stage)` - 1.
        """
        lineage: dict[str, Any] = {"zero_optimization": {"stage": stage, **self.withdrawn.get(stage, {})}}
        for knob in self.knobs[stage]:
            index, position = divmod(index, len(knob.values))
            _set(lineage, knob.path, knob.values[position])
        return lineage

    def index(self, lineage: Mapping[str, Any]) -> int | None:
        """Returns which lineage of its stage some knobs are (the inverse of `lineage`); None if they are of none."""
        stage = lineage.get("zero_optimization", {}).get("stage")
        index, weight = 0, 1
        for knob in self.knobs.get(stage, ()):
            value = _get(lineage, knob.path)
            if value not in knob.values:
                return None
            index += weight * knob.values.index(value)
            weight *= len(knob.values)
        return index if stage in self.knobs and self.lineage(stage, index) == lineage else None

    def draw(self, stage: int, rng: random.Random) -> dict[str, Any]:
        """Returns the knobs of a lineage of a stage, each as likely as any other."""
        return self.lineage(stage, rng.randrange(self.size(stage)))


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


def _set(config: dict[str, Any], path: str, value: int | bool) -> None:
    *sections, key = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[key] = value


def _get(config: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        config = config.get(key, {})
    return config
