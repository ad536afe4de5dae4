"""The replicas of the model that an engine runs, and the ranks that share the tokens of a sample."""

from typing import Any


def sequence_parallel_size(engine: Any) -> int:
    """Returns the ranks that share the tokens of a sample (Ulysses); 1 without it, and before DeepSpeed had it."""
    return max(1, int(getattr(engine, "sequence_parallel_size", 1) or 1))


def replicas_of(engine: Any) -> int:
    """Returns the model replicas of an engine. Each has a batch of its own."""
    own = engine.dp_world_size
    if own is not None:
        return int(own)
    # deepspeed/utils/groups.py: under Ulysses DeepSpeed leaves it out, and ZeRO partitions over all ranks of a group.
    return max(1, int(engine.seq_dp_world_size) // sequence_parallel_size(engine))
