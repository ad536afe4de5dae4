"""The replicas of the model that an engine runs, and the ranks that share the tokens of a sample."""

from collections.abc import Callable
from typing import Any

import torch

_TOLD = (
    "This layout makes {asked} of {ranks} ranks, but the engine has {found}. Say in search_space what the switch is "
    "the size of (layout: tensor, sequence, pipeline or expert), or leave it out."
)


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


def part_of_replica(engine: Any) -> int:
    """Returns a number that all ranks with the same part of the model, or of each sample, have in common."""
    if sequence_parallel_size(engine) > 1:
        from deepspeed.utils import groups

        return int(groups._get_sequence_parallel_rank())
    return min(torch.distributed.get_process_group_ranks(engine.data_parallel_group))


def refuse_other_replicas(engine: Any, asked: int | None, refuse: Callable[[str, str], Any]) -> None:
    """Refuses a trial whose engine has not the replicas of its layout. Its global batch would be another.

    Args:
        engine: that trains.
        asked: the replicas of the layout; None if the trial has no layout of its own.
        refuse: ends the trial with an outcome and a reason.
    """
    found = replicas_of(engine)
    if asked is not None and found != asked:
        ranks = torch.distributed.get_world_size()
        refuse("invalid", _TOLD.format(asked=_replicas(asked), ranks=ranks, found=_replicas(found)))


def _replicas(count: int) -> str:
    return "1 replica of the model" if count == 1 else f"{count} replicas of the model"
