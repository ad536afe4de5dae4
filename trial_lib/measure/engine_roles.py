"""Decides which engines of a program follow a candidate: those that train.

A frozen teacher, a reference model and a reward model keep the configuration that the code gives them.
"""

from collections.abc import Mapping
from typing import Any

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

_BATCH = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)


def trains(optimizer: Any, config: Mapping[str, Any]) -> bool:
    """Returns whether an engine has an optimizer, by DeepSpeed's own rule.

    Args:
        optimizer: the argument of `deepspeed.initialize`.
        config: the DeepSpeed configuration that the code passes.
    """
    named = config.get("optimizer")
    return optimizer is not None or (isinstance(named, Mapping) and named.get("type") is not None)


class Followers:
    """The engines of one run of a program that train. All of them follow the candidate, as the two of a GAN do.

    One loss may go through several engines, and DeepSpeed refuses that for engines of different stages. An engine whose
    own batch differs from the first one's keeps its batch. An actor's critic is an example.
    """

    def __init__(self) -> None:
        """Starts before the first engine."""
        self._batches: list[dict[str, Any]] = []

    def start_over(self) -> None:
        """Waits for the first engine again, because the program is run again."""
        self._batches.clear()

    def overrides_for(self, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the overrides that an engine that trains has to follow.

        Args:
            config: the configuration that the code passes for it.
            overrides: for the first of the engines.
        """
        own = {key: config[key] for key in _BATCH if key in config}
        candidates = {key: overrides[key] for key in _BATCH if key in overrides}
        if not self._batches:
            self._batches = [own]
        # The code may pass one dictionary twice. It then returns with the candidate's values, and with values that
        # follow from them.
        if own in self._batches or (candidates and candidates.items() <= own.items()):
            return overrides
        return {key: value for key, value in overrides.items() if key not in _BATCH}
