"""The observer of DeepSpeed's replaced functions.

They are replaced once, and the probe changes with each size of a sweep.
"""

from collections.abc import Callable
from typing import Any

from trial_lib.measure.libraries.interception import InitializeObserver


class CurrentProbe:
    """Forwards each event to the current probe.

    Args:
        find: returns that probe.
    """

    def __init__(self, find: Callable[[], InitializeObserver | None]) -> None:
        self._find = find

    def _probe(self) -> InitializeObserver:
        probe = self._find()
        assert probe is not None
        return probe

    @property
    def has_engine(self) -> bool:
        """See `InitializeObserver.has_engine`."""
        return self._probe().has_engine

    def initialize_called(self) -> None:
        """See `InitializeObserver.initialize_called`."""
        self._probe().initialize_called()

    def engine_built(self, engine: Any) -> None:
        """See `InitializeObserver.engine_built`."""
        self._probe().engine_built(engine)

    def frozen_engine_built(self) -> None:
        """See `InitializeObserver.frozen_engine_built`."""
        self._probe().frozen_engine_built()

    def group_destroyed(self) -> None:
        """See `InitializeObserver.group_destroyed`."""
        self._probe().group_destroyed()
