"""Waits for slots, in Prefect: the run's log has a word now and then, and its state is named after the wait."""

import logging
import time

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Running

from tasks.telling import told_if_possible

STATE = "Waiting for slots"
_FIRST_WORD_S, _RAREST_S = 30.0, 600.0


class SlotWaits:
    """Tells Prefect while all that a run has started waits for slots.

    Args:
        log: gets what Prefect does not take.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._began = self._next_word = 0.0

    def tell(self, waits: list[str], running: int) -> None:
        """Takes what waits now.

        Args:
            waits: a sentence for each wait.
            running: the number of all that has started and not ended.
        """
        is_waiting, was_waiting = 0 < len(waits) == running, bool(self._began)
        if is_waiting and time.monotonic() >= self._next_word:
            self._began = self._began or time.monotonic()
            seconds = time.monotonic() - self._began
            self._next_word = time.monotonic() + min(max(_FIRST_WORD_S, seconds), _RAREST_S)
            for wait in waits:
                get_run_logger().info("waiting for slots: %s", wait)
        if is_waiting != was_waiting:
            if not is_waiting:
                self._began = self._next_word = 0.0
                get_run_logger().info("the wait for slots is over")
            # Not forced, so a cancellation in between stays.
            state = Running(name=STATE, message=waits[0]) if is_waiting else Running()
            with told_if_possible(self._log):
                get_client(sync_client=True).set_flow_run_state(flow_run.id, state)
