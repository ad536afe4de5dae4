"""The places where the ranks of a trial leave messages for each other.

Ranks on one host, or on hosts with a shared folder, leave files. Those of a Ray cluster share no folder. They meet in
the key-value store of their rendezvous, which rank 0 serves (`torch.distributed.TCPStore`).
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import distributed

_POLL_S = 0.02
# The time for the others to read the last messages, before the rank that serves them ends.
_READ_S = 5.0


class Board(Protocol):
    """Messages by rank and round. Round 0 has the ranks' states."""

    def open(self) -> None:
        """Begins to see the other ranks. Their process group must exist."""

    @property
    def ranks(self) -> range:
        """The ranks whose messages this rank can see."""

    @property
    def is_lost(self) -> bool:
        """Whether the messages of the others cannot be read any more."""

    def put(self, rank: int, number: int, content: Any) -> None:
        """Leaves this rank's message of a round; None removes it."""

    def get(self, rank: int, number: int) -> Any:
        """Returns a rank's message of a round; None if there is none."""

    def finish(self, number: int) -> None:
        """Tells that this rank has read a round. The rank that serves the messages waits for the others."""


class Files:
    """Messages in a folder that all ranks see.

    Args:
        states: the paths of the ranks' states, by rank.
    """

    is_lost = False

    def __init__(self, states: list[str]) -> None:
        self._states = [Path(state) for state in states]

    def open(self) -> None:
        """See `Board.open`. Files can be seen before."""

    @property
    def ranks(self) -> range:
        """See `Board.ranks`."""
        return range(len(self._states))

    def put(self, rank: int, number: int, content: Any) -> None:
        """See `Board.put`. Others see the file whole or not at all. It need not survive a loss of power."""
        path = self._path(rank, number)
        if content is None:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)

    def get(self, rank: int, number: int) -> Any:
        """See `Board.get`."""
        try:
            return json.loads(self._path(rank, number).read_text())
        except (OSError, ValueError):
            return None

    def finish(self, number: int) -> None:
        """See `Board.finish`. Files stay."""

    def _path(self, rank: int, number: int) -> Path:
        return self._states[rank].with_suffix(f".{number}.json") if number else self._states[rank]


class Store:
    """Messages in the store of the ranks' rendezvous. Before `open`, a rank sees itself alone.

    Args:
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._all = range(ranks)
        self._own: dict[int, Any] = {}
        self._store: Any = None
        self.is_lost = False

    def open(self) -> None:
        """See `Board.open`. The store then lives on, also if the program destroys its process group.

        A program whose ranks meet by MPI has no store. While a thread of this process hangs in the store itself, no
        other thread gets through.
        """
        with contextlib.suppress(RuntimeError, ValueError):
            self._store = distributed.distributed_c10d._get_default_store()

    @property
    def ranks(self) -> range:
        """See `Board.ranks`."""
        return range(self._rank, self._rank + 1) if self._store is None else self._all

    def put(self, rank: int, number: int, content: Any) -> None:
        """See `Board.put`."""
        self._own[number] = content
        if self._store is not None:
            with self._losing():
                self._store.set(_key(rank, number), json.dumps(content))

    def get(self, rank: int, number: int) -> Any:
        """See `Board.get`."""
        if rank == self._rank:
            return self._own.get(number)
        if self._store is not None:
            with self._losing():
                if self._store.check([_key(rank, number)]):
                    return json.loads(self._store.get(_key(rank, number)))
        return None

    def finish(self, number: int) -> None:
        """See `Board.finish`."""
        if self._store is None:
            return
        deadline = time.monotonic() + _READ_S
        with self._losing():
            read = [f"{_key(rank, number)}/read" for rank in self._all]
            self._store.set(read[self._rank], "")
            while self._rank == 0 and not self._store.check(read) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            # Rank 0 has ended.
            self.is_lost = True


def _key(rank: int, number: int) -> str:
    return f"zerotune/{rank}/{number}"
