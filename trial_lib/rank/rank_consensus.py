"""Agreement between ranks by messages.

At a program's end the ranks may be in collectives of the program, which other collectives would disturb. Messages need
no process group. A thread can use them while the program itself hangs in a collective.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from zerotune.trial_lib.messages.files import open_own

_POLL_S = 0.02
# The time for the others to read the last messages, before the rank that serves them ends.
_READ_S = 5.0


class FolderMailbox:
    """Messages by rank and round, in a folder that all ranks see. Round 0 has the ranks' states (`states` by rank)."""

    is_lost = False  # the messages of the others cannot be read any more

    def __init__(self, states: list[str]) -> None:
        self._states = [Path(state) for state in states]

    def open(self) -> None: ...  # after the ranks' process group exists
    def close(self) -> None: ...  # disconnects; `open` reconnects

    @property
    def ranks(self) -> range:  # whose messages this rank can see
        return range(len(self._states))

    def put(self, rank: int, number: int, content: Any) -> None:
        # None removes it. Others see the file whole or not at all. It need not survive a loss of power.
        path = self._path(rank, number)
        if content is None:
            path.unlink(missing_ok=True)
            return
        temporary = path.with_name(f".{path.name}")
        with open_own(temporary, "w") as file:
            file.write(json.dumps(content))
        temporary.replace(path)

    def get(self, rank: int, number: int) -> Any:
        try:
            return json.loads(self._path(rank, number).read_text())
        except (OSError, ValueError):
            return None

    # This rank has read the round. The one that serves the messages waits for that.
    def finish(self, number: int) -> None: ...

    def _path(self, rank: int, number: int) -> Path:
        return self._states[rank].with_suffix(f".{number}.json") if number else self._states[rank]


class StoreMailbox:
    """Messages in the store of the ranks' rendezvous, for the size at `position`. Before `open`, one sees oneself."""

    def __init__(self, rank: int, ranks: int, position: int = 0) -> None:
        self._rank = rank
        self._all = range(ranks)
        self._position = position
        self._own: dict[int, Any] = {}
        self._served: Any = None
        self._store: Any = None
        self.is_lost = False

    def open(self) -> None:
        # The store then lives on, even if the program destroys its process group.
        with self._losing():
            self._served = distributed.distributed_c10d._get_default_store()
            self._store = self._served
            # A connection of its own gets through while another thread hangs in the store. Older versions of torch have
            # none (pytorch/pytorch#150966).
            with contextlib.suppress(AttributeError, RuntimeError):
                self._store = self._served.clone()
            # Ranks that meet by MPI have one that cannot be used.
            self._store.check([self._key(self._rank, 0)])
        for number, content in self._own.items():
            self.put(self._rank, number, content)

    def close(self) -> None:
        # A kept store would give the next process group the addresses of this one.
        self._store = self._served = None

    @property
    def ranks(self) -> range:
        is_alone = self._store is None and not self.is_lost
        return range(self._rank, self._rank + 1) if is_alone else self._all

    def put(self, rank: int, number: int, content: Any) -> None:
        self._own[number] = content
        if self._store is not None:
            with self._losing():
                self._store.set(self._key(rank, number), json.dumps(content))

    def get(self, rank: int, number: int) -> Any:
        if rank == self._rank:
            return self._own.get(number)
        key = self._key(rank, number)
        if self._store is not None:
            with self._losing():
                return json.loads(self._store.get(key)) if self._store.check([key]) else None
        return None

    def finish(self, number: int) -> None:
        if self._store is None:
            return
        deadline = time.monotonic() + _READ_S
        with self._losing():
            read = [f"{self._key(rank, number)}/read" for rank in self._all]
            self._store.set(read[self._rank], "")
            while self._rank == 0 and not self._store.check(read) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError):
            # Rank 0 has ended, or there is no store.
            self.is_lost = True

    def _key(self, rank: int, number: int) -> str:
        return f"zerotune/{self._position}/{rank}/{number}"


class RankConsensus:
    """The messages between the ranks of a trial.

    `failures` are the paths of their records of failure, by rank. A rank may not see the record of another host.
    """

    def __init__(self, mailbox: FolderMailbox | StoreMailbox, rank: int, failures: list[str]) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._failures = [Path(failure) for failure in failures]
        self._round = 0
        self._is_open = False

    def open(self) -> None:
        """Begins to see the other ranks, once their process group exists."""
        self._is_open = True
        self._mailbox.open()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Drops the connection to the process group while the program replaces it."""
        self._mailbox.close()
        yield
        if self._is_open:
            self._mailbox.open()

    def say(self, state: dict[str, Any] | None) -> None:
        """Leaves this rank's state for the other ranks, and in a file for the driver; None if it matters to neither."""
        self._mailbox.put(self._rank, 0, state)

    def said(self) -> list[dict[str, Any] | None]:
        return [self._mailbox.get(rank, 0) for rank in range(len(self._failures))]

    def gather(self, own: Any, seconds: float = float("inf")) -> list[Any] | None:
        """What each rank brings, in rank order; None if another has failed or is late.

        All call it in the same order.
        """
        self._round += 1
        self._mailbox.put(self._rank, self._round, [own])
        deadline = time.monotonic() + seconds
        brought = []
        for rank in self._mailbox.ranks:
            while (found := self._mailbox.get(rank, self._round)) is None:
                if self._failures[rank].exists() or self._mailbox.is_lost or time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_S)
            brought += found
        self._mailbox.finish(self._round)
        return brought


# Figures over all ranks. Every rank of a trial calls these functions at the same moments.

# Time for every rank to write a few figures.
_CONSENSUS_S = 60.0


class NoAgreementError(Exception):
    """A rank has not delivered its figures."""


def most(values: list[float], engine: Any) -> list[float]:
    """The largest of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.MAX, engine)


def total(values: list[float], engine: Any) -> list[float]:
    """The sum of each value over all ranks of an engine."""
    return _reduced(values, torch.distributed.ReduceOp.SUM, engine)


def of_each(values: list[float], engine: Any) -> list[list[float]]:
    """The values of each rank, in rank order."""
    ranks, width = torch.distributed.get_world_size(), len(values)
    own = torch.distributed.get_rank() * width
    summed = total([*[0.0] * own, *values, *[0.0] * (ranks * width - own - width)], engine)
    return [summed[start : start + width] for start in range(0, ranks * width, width)]


@contextlib.contextmanager
def by_messages(consensus: RankConsensus) -> Iterator[None]:
    """Makes the ranks agree by messages: the program may be in a collective, or may have no process group."""
    _by_messages.append(consensus)
    try:
        yield
    finally:
        _by_messages.pop()


_by_messages: list[RankConsensus] = []


def _reduced(values: list[float], operation: Any, engine: Any) -> list[float]:
    if _by_messages:
        brought = _by_messages[-1].gather(values, _CONSENSUS_S)
        if brought is None:
            raise NoAgreementError
        reduce = max if operation == torch.distributed.ReduceOp.MAX else sum
        return [float(reduce(column)) for column in zip(*brought, strict=True)]
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(tensor, op=operation)
    return [float(value) for value in tensor.tolist()]
