"""Agreement between ranks by files.

At a program's end the ranks may be in collectives of the program, which other collectives would disturb.

Files need no process group. A thread can use them while the program itself hangs in a collective.
"""

import json
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.02


class Meeting:
    """The messages between the ranks of a trial, in files that all of them see.

    Args:
        states: the paths of the ranks' states, by rank.
        rank: this rank.
        failures: the paths of the ranks' records of failure, by rank.
    """

    def __init__(self, states: list[str], rank: int, failures: list[str]) -> None:
        self._states = [Path(state) for state in states]
        self._rank = rank
        self._failures = [Path(failure) for failure in failures]
        self._round = 0

    def say(self, state: dict[str, Any] | None) -> None:
        """Writes this rank's state for the other ranks and the driver; None if it matters to neither."""
        path = self._states[self._rank]
        if state is None:
            path.unlink(missing_ok=True)
        else:
            _write(path, state)

    def said(self) -> list[dict[str, Any] | None]:
        """Returns the state of each rank, in rank order."""
        return [_read(state) for state in self._states]

    def gather(self, own: Any, seconds: float = float("inf")) -> list[Any] | None:
        """Returns the contribution of each rank, in rank order. All of them call it in the same order.

        Args:
            own: this rank's contribution, as plain data.
            seconds: to wait for the others.

        Returns:
            None if another rank has failed, or is late.
        """
        self._round += 1
        _write(self._brought(self._rank), [own])
        deadline = time.monotonic() + seconds
        brought = []
        for rank, failure in enumerate(self._failures):
            while (found := _read(self._brought(rank))) is None:
                if failure.exists() or time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            brought += found
        return brought

    def _brought(self, rank: int) -> Path:
        return self._states[rank].with_suffix(f".{self._round}.json")


def _write(path: Path, content: Any) -> None:
    """Writes a file that other ranks see whole or not at all. It need not survive a loss of power."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
