"""Which engines of a program follow a candidate: those that train.

A frozen teacher, a reference or a reward model keeps the configuration that its code gives it.
"""

from collections.abc import Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

_BATCH = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)


def trains(optimizer: Any, config: Mapping[str, Any]) -> bool:
    """Returns whether an engine has an optimizer, by what DeepSpeed itself goes by.

    Args:
        optimizer: that the code hands to `deepspeed.initialize`.
        config: the DeepSpeed configuration that it hands over.
    """
    named = config.get("optimizer")
    return optimizer is not None or (isinstance(named, Mapping) and named.get("type") is not None)


class Followers:
    """The engines of one run of a program that train: all of them follow, as the two of a GAN do.

    One loss may go through several of them, which DeepSpeed refuses for engines of different stages. An engine that
    has another batch of its own than the first, such as an actor's critic, keeps that batch.
    """

    def __init__(self) -> None:
        """Starts before the first engine."""
        self._batches: list[dict[str, Any]] = []

    def start_over(self) -> None:
        """Waits for the first engine again: the program is run again."""
        self._batches.clear()

    def overrides_for(self, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what of the overrides an engine that trains is to follow.

        Args:
            config: what the code passes for it.
            overrides: for the first of them.
        """
        own = {key: config[key] for key in _BATCH if key in config}
        candidates = {key: overrides[key] for key in _BATCH if key in overrides}
        if not self._batches:
            self._batches = [own]
        # A dictionary of the code that has been merged into comes back with the candidate's, and what follows from it.
        if own in self._batches or (candidates and candidates.items() <= own.items()):
            return overrides
        return {key: value for key, value in overrides.items() if key not in _BATCH}
