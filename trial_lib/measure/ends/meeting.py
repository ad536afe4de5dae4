"""Agreement between ranks by messages.

At a program's end the ranks may be in collectives of the program, which other collectives would disturb.

Messages need no process group. A thread can use them while the program itself hangs in a collective.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trial_lib.measure.ends.boards import Board

_POLL_S = 0.02


class Meeting:
    """The messages between the ranks of a trial.

    Args:
        board: holds the messages.
        rank: this rank.
        failures: the paths of the ranks' records of failure, by rank. A rank may not see the record of another host.
    """

    def __init__(self, board: Board, rank: int, failures: list[str]) -> None:
        self._board = board
        self._rank = rank
        self._failures = [Path(failure) for failure in failures]
        self._round = 0
        self._is_open = False

    def open(self) -> None:
        """Begins to see the other ranks. Call it when their process group exists."""
        self._is_open = True
        self._board.open()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps nothing of a process group while the program joins another."""
        self._board.close()
        yield
        if self._is_open:
            self._board.open()

    def say(self, state: dict[str, Any] | None) -> None:
        """Leaves this rank's state for the other ranks, and in a file for the driver; None if it matters to neither."""
        self._board.put(self._rank, 0, state)

    def said(self) -> list[dict[str, Any] | None]:
        """Returns the state of each rank, in rank order."""
        return [self._board.get(rank, 0) for rank in range(len(self._failures))]

    def gather(self, own: Any, seconds: float = float("inf")) -> list[Any] | None:
        """Returns the contribution of each rank, in rank order. All of them call it in the same order.

        Args:
            own: this rank's contribution, as plain data.
            seconds: to wait for the others.

        Returns:
            None if another rank has failed, or is late.
        """
        self._round += 1
        self._board.put(self._rank, self._round, [own])
        deadline = time.monotonic() + seconds
        brought = []
        for rank in self._board.ranks:
            while (found := self._board.get(rank, self._round)) is None:
                if self._failures[rank].exists() or self._board.is_lost or time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            brought += found
        self._board.finish(self._round)
        return brought
