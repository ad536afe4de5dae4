"""The replicas of the model that an engine runs, compared with those that a trial asks for."""

from collections.abc import Callable
from typing import Any

import torch

from trial_lib.deepspeed_config.engine_replicas import replicas_of, sequence_parallel_size

_TOLD = (
    "This layout makes {asked} of {ranks} ranks, but the engine has {found}. Say in search_space what the switch is "
    "the size of (layout: tensor, sequence, pipeline or expert), or leave it out."
)


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
