"""Ends a trial whose program ends before it is measured. The ranks agree on whether their steps are enough.

The program may have ended by itself, or may wait forever. One of its collectives may also have failed, because another
rank has ended. The steps so far count if they are enough on all ranks.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from trial_lib.measure.batches.loader_batches import loader_batches
from trial_lib.measure.ends.endings import (
    ENDED,
    FAILED,
    WAITS,
    EndedEarlyError,
    RankEnd,
    WaitsForEverError,
    are_uneven,
    too_little_data,
    uneven_note,
    waits_for_ever,
)
from trial_lib.measure.ends.meeting import Meeting
from trial_lib.measure.ends.stacks import Doing, is_of_a_collective
from trial_lib.measure.figures.over_ranks import NoAgreementError, by_messages
from trial_lib.measure.probe import Probe
from trial_lib.wire.rank_order import ANOTHER_HAS_FAILED

# The guard gives the peers of a failed rank this long. A rank that waits in a thread needs no longer.
_PEERS_S, _WAITING_S = 3.0, 60.0
_NOWHERE = Doing("", "")


class Closing:
    """The end of one size's measurement, on this rank.

    Args:
        probe: measures the size.
        meeting: of the ranks.
        leave: called before the measurement is handed over, if the program cannot be run again after it.
        fail: records a failure and ends the process.
    """

    def __init__(
        self,
        probe: Probe,
        meeting: Meeting,
        leave: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.probe = probe
        self.meeting = meeting
        self.fail = fail
        self._leave = leave
        self._closes = threading.Lock()
        self._closer: threading.Thread | None = None
        self._raised: Exception | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the end has come."""
        return self.probe.has_finished or self.is_closing

    @property
    def is_closing(self) -> bool:
        """Whether the program has ended, or waits forever, so that it trains no further."""
        return self._closes.locked()

    def say(self, end: RankEnd | None) -> None:
        """Leaves this rank's state for those who can see it (`Meeting.say`); None if it goes on."""
        self.meeting.say(None if end is None else {"end": asdict(end), "words": end.words})

    def by_itself(self) -> None:
        """Closes for a program that has ended by itself.

        Raises:
            EndedEarlyError: it has no engine, or another rank has failed.
        """
        self.say(self.end(ENDED, _NOWHERE))
        if threading.current_thread() is not self.probe.thread:
            self._leave()
        self._close(ENDED, _NOWHERE, float("inf"))

    def after(self, error: BaseException) -> None:
        """Closes for a program that an exception has ended, if the exception means that its data are over.

        Otherwise it returns.
        """
        if _data_are_over(error, self.probe.micro_batches):
            self.by_itself()
        elif is_of_a_collective(error):
            self._close(FAILED, _NOWHERE, _PEERS_S)

    def waits(self, doing: Doing) -> None:
        """Closes, from a thread of its own, for a program that waits forever. Ends the process."""
        # A value that has to be read from a device may wait with the device.
        limit = threading.Timer(_WAITING_S, lambda: self.fail(WaitsForEverError(self._alone(doing))))
        limit.daemon = True
        limit.start()
        try:
            self._close(WAITS, doing, _WAITING_S / 2)
            self.fail(WaitsForEverError(self._alone(doing)))
        except BaseException as error:  # noqa: BLE001 - there is nobody above to hear of it
            self.fail(error)

    def _alone(self, doing: Doing) -> str:
        return waits_for_ever([self.end(WAITS, doing)], self.probe.has_engine)

    def end(self, kind: str, doing: Doing) -> RankEnd:
        """Returns the progress and the state of this rank."""
        return RankEnd(kind, **self.probe.progress, waits_in=doing.waits_in, where=doing.where)

    def _close(self, kind: str, doing: Doing, seconds: float) -> None:
        """Agrees with the other ranks. Returns only if a failure of this rank counts as one."""
        if not self._closes.acquire(blocking=False):
            if self._closer is threading.current_thread() and self._raised is not None:
                # The program has caught the error, and has ended again.
                raise self._raised
            # Another thread of this rank is about to end the process.
            while True:
                time.sleep(_WAITING_S)
        self._closer = threading.current_thread()
        try:
            self._agree(kind, doing, seconds)
        except (EndedEarlyError, WaitsForEverError) as error:
            self._raised = error
            raise

    def _agree(self, kind: str, doing: Doing, seconds: float) -> None:
        probe = self.probe
        brought = self.meeting.gather(asdict(self.end(kind, doing)), seconds)
        ends = [] if brought is None else [RankEnd(**each) for each in brought]
        if kind == FAILED and not are_uneven(ends):
            return
        if not ends:
            raise EndedEarlyError(ANOTHER_HAS_FAILED)
        if any(end.kind == WAITS for end in ends) and (not probe.has_engine or not are_uneven(ends)):
            raise WaitsForEverError(waits_for_ever(ends, probe.has_engine))
        if not probe.has_engine:
            raise EndedEarlyError(_without_engine(probe))
        if any(end.kind != ENDED for end in ends):
            self._leave()
        self._hand_over(ends)

    def _hand_over(self, ends: list[RankEnd]) -> None:
        probe = self.probe
        counted, steps = min(end.counted for end in ends), min(end.steps for end in ends)
        if counted < probe.window.min_steps:
            elsewhere = probe.facts.steps_elsewhere
            reason = too_little_data(ends, probe.window.end_step, probe.batch)
            probe.refuse("out_of_data", f"{reason}{_another_trains(elsewhere)}" if elsewhere > steps else reason)
            return
        try:
            with by_messages(self.meeting):
                probe.measure_common(counted, steps, uneven_note(ends) if are_uneven(ends) else "")
        except NoAgreementError:
            raise EndedEarlyError(ANOTHER_HAS_FAILED) from None


def _data_are_over(error: BaseException, micro_batches: int) -> bool:
    """Returns whether an exception only means that there was no further batch, or none at all."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, StopIteration):
            return True
        link = link.__cause__
    # Code after a loop that never began uses the last loss, or the number of batches.
    return micro_batches == 0 and loader_batches.came_empty and isinstance(error, (NameError, ArithmeticError))


def _another_trains(steps: int) -> str:
    return (
        f" ZeroTune measures the first engine that trains, and other engines have taken {steps} optimizer steps. "
        "To tune one of those, let the program train it first."
    )


def _without_engine(probe: Any) -> str:
    if probe.has_frozen_engine:
        return (
            "None of the program's DeepSpeed engines has an optimizer, so none of them trains. Give "
            "deepspeed.initialize an optimizer, or name one in its configuration."
        )
    return "The program ended without calling deepspeed.initialize."
