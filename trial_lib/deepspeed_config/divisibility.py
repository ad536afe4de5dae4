"""What the groups of a layout have to divide: devices, heads, tokens, layers, experts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trial_lib.deepspeed_config.layout import Layout


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that groups divide, as far as they are known.

    Attributes:
        head_counts: attention heads, then key-value heads.
        layer_count: layers that the stages of a pipeline share. 0 if unknown.
        expert_counts: experts of the layers of DeepSpeed's mixture, each number once.
        sequence_length: tokens of every sample. 0 if unknown, or if samples differ.
    """

    head_counts: Sequence[int] = ()
    layer_count: int = 0
    expert_counts: Sequence[int] = ()
    sequence_length: int = 0


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
    """Returns the heads that Ulysses cannot give to the ranks of a group.

    Fewer key-value heads than ranks are repeated (deepspeed/runtime/sequence_parallel/ulysses_sp.py).
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
