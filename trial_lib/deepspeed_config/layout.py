"""The layout of a configuration: how its ranks share a replica of the model. Pure.

A rank imports this module from the user's environment: standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zerotune.trial_lib.messages.measurement import ModelProfile

AUTOTP = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"
AUTOEP = "expert_parallel.autoep_size"

GROUPS = {AUTOTP: "tensor-parallel", SEQUENCE: "sequence"}
"""The settings that divide the ranks into groups, with the word for a group. A group holds one replica of the model."""

PROGRAM = "program"
"""The section of a candidate's knobs that has the switches, by their places. DeepSpeed has no such key."""

LAYOUTS = "layouts"
"""The section of the user's settings that has the kinds of the switches that are layouts, by their places. As above."""

LAYOUT_KINDS = ("tensor", "sequence", "pipeline", "expert")
"""What a switch can be the size of: groups of tensor parallelism, of Ulysses or of experts, or a pipeline's depth."""

VARIABLES_OF_LAYOUTS = {"PARALLELISM_CONFIG_SP_SIZE": "sequence"}
"""The environment variables that are the size of a layout, with its kind.

Accelerate, and so a Trainer, reads them if its `ParallelismConfig` leaves the size open. It takes 1 if a variable is
not set (accelerate/parallelism_config.py).
"""

_OF_SETTINGS = {AUTOTP: "tensor", SEQUENCE: "sequence", AUTOEP: "expert"}


@dataclass(frozen=True)
class Layout:
    """How the ranks of a configuration share a replica of the model, in ranks. A group of one is none."""

    tensor: int = 1  # of a tensor-parallel group
    sequence: int = 1  # of a group of Ulysses' sequence parallelism
    pipeline: int = 1  # stages of the pipeline
    expert: int = 1  # of a group that divides the experts of a mixture. Its ranks have batches of their own.

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Layout":
        """Returns the layout of a complete configuration, which may have the sections `PROGRAM` and `LAYOUTS`."""
        return cls().changed(config, config.get(LAYOUTS) or {})

    def changed(self, settings: Mapping[str, Any], kinds: Mapping[str, str]) -> "Layout":
        """Takes the sizes of some settings, in sections or by path, and of the switches that have kinds."""
        sizes = {kind: _size(settings, path, path.split(".")) for path, kind in _OF_SETTINGS.items()}
        for place, kind in kinds.items():
            size = _size(settings, f"{PROGRAM}.{place}", [PROGRAM, place])
            sizes[kind] = sizes.get(kind) if size is None else size
        return replace(self, **{kind: max(1, size) for kind, size in sizes.items() if size is not None})

    @property
    def ranks(self) -> int:
        return self.tensor * self.sequence * self.pipeline


def group_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the groups that a DeepSpeed configuration asks for, by setting. A group of one is none."""
    sizes = {path: _size(config, path, path.split(".")) for path in GROUPS}
    return {path: size for path, size in sizes.items() if size is not None and size > 1}


def group_words(settings: Mapping[str, Any]) -> list[str]:
    """Returns the groups that some settings name, in words. A group of one is none, and is said because it is named."""
    sizes = {path: _size(settings, path, path.split(".")) for path in GROUPS}
    return [
        f"{GROUPS[path]} groups of {size}" if size > 1 else f"no {GROUPS[path]} groups"
        for path, size in sizes.items()
        if size is not None
    ]


def ranks_of_a_replica(config: Mapping[str, Any]) -> int:
    """Returns the ranks that hold one replica of the model together, as far as the configuration says so."""
    return Layout.of(config).ranks


@dataclass(frozen=True)
class Replicas:
    """The model replicas of each candidate of a study. The profile trial counts those of the user's configuration. The
    program may divide its ranks too, such as among the stages of a pipeline. So a candidate has them by its groups
    beside the user's.
    """

    slots: int  # devices of a trial
    own: int  # replicas with the user's configuration
    base_config: Mapping[str, Any]  # the user's, with the sections `PROGRAM` and `LAYOUTS` if there are any

    def of(self, settings: Mapping[str, Any]) -> int:
        """Returns a candidate's replicas. If its groups do not divide the devices, some devices have no replica."""
        base = Layout.of(self.base_config)
        layout = base.changed(settings, self.base_config.get(LAYOUTS) or {})
        if replace(layout, expert=base.expert) == base:
            # The settings may say of groups that the engine does not have.
            return self.own
        others = max(1, self.slots // self.own)
        for size in (base.tensor, base.sequence, base.pipeline):
            # A group of the configuration that the engine does not have is none.
            others = others // size if others % size == 0 else others
        return max(1, self.slots // (layout.ranks * others))


def size_of(value: Any) -> int | None:
    """Returns the size that a value means, as a number or as its text; None if it means none."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(settings: Mapping[str, Any], flat: str, keys: list[str]) -> int | None:
    # The size of a group; None if the settings leave it open.
    value: Any = settings
    for key in [flat] if flat in settings else keys:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return size_of(value)


# What the groups of a layout have to divide: devices, heads, tokens, layers, experts.


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that groups divide, as far as they are known."""

    head_counts: Sequence[int] = ()  # attention heads, then key-value heads
    layer_count: int = 0  # layers that the stages of a pipeline share. 0 if unknown.
    expert_counts: Sequence[int] = ()  # experts of the layers of DeepSpeed's mixture, each number once
    sequence_length: int = 0  # tokens of every sample. 0 if unknown, or if samples differ.

    @classmethod
    def of(cls, profile: ModelProfile) -> "ModelShape":
        return cls(tuple(profile.head_counts), profile.layer_count, tuple(profile.expert_counts))


def undivided_devices(layout: Layout, slots: int) -> str | None:
    """Returns the groups that do not divide the devices of a trial, in words that follow "divide"; None if all do."""
    holding = [(layout.pipeline, "{} pipeline stages"), (layout.tensor, "tensor-parallel groups of {}")]
    holding.append((layout.sequence, "sequence groups of {}"))
    asked = [words.format(size) for size, words in holding if size > 1]
    if slots % layout.ranks:
        return f"{slots} devices into {' with '.join(asked)}"
    # deepspeed/utils/groups.py: experts are divided over the ranks with the same part of the model.
    apart = slots // (layout.pipeline * layout.tensor)
    return f"{apart} devices into expert groups of {layout.expert}" if apart % layout.expert else None


def undivided_heads(layout: Layout, shape: ModelShape) -> str | None:
    """Returns the heads that a tensor-parallel group does not divide, in the same words."""
    return next((f"{n} heads over {layout.tensor} ranks" for n in shape.head_counts if n % layout.tensor), None)


def unshared_heads(layout: Layout, shape: ModelShape) -> str | None:
    """Returns the heads that Ulysses cannot give to the ranks of a group. Fewer key-value heads than ranks are repeated
    (deepspeed/runtime/sequence_parallel/ulysses_sp.py).
    """
    heads, *key_values = shape.head_counts or (0,)
    if heads % layout.sequence:
        return f"{heads} heads over {layout.sequence} ranks"
    found = (n for n in key_values if n % layout.sequence and layout.sequence % n)
    return next((f"{n} key-value heads over {layout.sequence} ranks" for n in found), None)


def unshared_tokens(layout: Layout, shape: ModelShape) -> str | None:
    """Returns the samples that a sequence group cannot divide evenly."""
    length = shape.sequence_length
    return f"samples of {length} tokens over {layout.sequence} ranks" if length % layout.sequence else None


def empty_stages(layout: Layout, shape: ModelShape) -> str | None:
    """Returns the layers that are fewer than the stages of a pipeline."""
    layers = shape.layer_count
    return f"{layers} layers over {layout.pipeline} stages" if 0 < layers < layout.pipeline else None


def undivided_experts(layout: Layout, shape: ModelShape) -> str | None:
    """Returns the experts that a group does not divide."""
    return next((f"{n} experts over {layout.expert} ranks" for n in shape.expert_counts if n % layout.expert), None)
