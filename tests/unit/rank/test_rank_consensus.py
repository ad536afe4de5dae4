"""The places where ranks leave messages for each other, with a real store of a rendezvous."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from zerotune.trial_lib.rank.rank_consensus import FolderMailbox, RankConsensus, StoreMailbox

RANKS = 2


class Rendezvous:
    """A store as two ranks have it, each with a connection of its own. Rank 0 serves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.serve()

    def serve(self) -> None:
        """Serves a new store, and lets go of the last."""
        served = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        connected = distributed.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
        self.stores: list[Any] = [served, connected]

    def become(self, rank: int) -> None:
        """Makes this process a rank, whose default process group has the store."""
        self._monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: self.stores[rank])


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    return Rendezvous(monkeypatch)


def meetings(tmp_path: Path, rendezvous: Rendezvous | None = None) -> list[RankConsensus]:
    """Returns the meeting of each rank. They share no folder."""
    failures = [str(tmp_path / f"failure{rank}") for rank in range(RANKS)]
    each = [RankConsensus(StoreMailbox(rank, RANKS), rank, failures) for rank in range(RANKS)]
    for rank, meeting in enumerate(each):
        if rendezvous is not None:
            rendezvous.become(rank)
            meeting.open()
    return each


def sees(meeting: RankConsensus, *said: object) -> bool:
    """Returns whether a rank soon sees these states. Another connection sees a message some time after it was sent."""
    deadline = time.monotonic() + 10
    while meeting.said() != [*said] and time.monotonic() < deadline:
        time.sleep(0.01)
    return meeting.said() == [*said]


def gathered(each: list[RankConsensus], own: list[object], seconds: float = 20.0) -> list[object]:
    """Returns what each rank has gathered, all at once."""
    found: list[object] = [None] * len(each)

    def gather(rank: int) -> None:
        found[rank] = each[rank].gather(own[rank], seconds)

    threads = [threading.Thread(target=gather, args=(rank,), daemon=True) for rank in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_ranks_without_a_common_folder_meet_in_the_store_of_their_rendezvous(
    tmp_path: Path, rendezvous: Rendezvous
) -> None:
    ranks = meetings(tmp_path, rendezvous)
    assert gathered(ranks, [{"steps": 3}, {"steps": 4}]) == [[{"steps": 3}, {"steps": 4}]] * 2
    assert gathered(ranks, [0.5, 0.25]) == [[0.5, 0.25]] * 2


def test_states_are_seen_by_the_other_ranks_until_they_are_taken_back(tmp_path: Path, rendezvous: Rendezvous) -> None:
    first, second = meetings(tmp_path, rendezvous)
    first.say({"end": "waits"})
    assert sees(second, {"end": "waits"}, None)
    first.say(None)
    assert sees(second, None, None)


def test_a_rank_whose_peer_does_not_come_waits_its_seconds(tmp_path: Path, rendezvous: Rendezvous) -> None:
    first, second = meetings(tmp_path, rendezvous)
    began = time.monotonic()
    assert first.gather("mine", seconds=0.2) is None
    assert time.monotonic() - began >= 0.2
    second.gather("late", seconds=0.2)
    assert gathered([first, second], ["a", "b"]) == [["a", "b"]] * 2


def test_a_rank_whose_rank_0_has_ended_waits_no_longer(tmp_path: Path, rendezvous: Rendezvous) -> None:
    meeting = meetings(tmp_path, rendezvous)[1]
    rendezvous.stores[0] = None
    gc.collect()
    assert meeting.gather("mine") is None


def test_rank_0_stays_until_the_others_have_read(tmp_path: Path, rendezvous: Rendezvous) -> None:
    first, second = meetings(tmp_path, rendezvous)
    ended = []
    waits = threading.Thread(target=lambda: ended.append(first.gather("a")), daemon=True)
    waits.start()
    rendezvous.stores[1].set("zerotune/0/1/1", '["b"]')
    waits.join(0.5)
    assert not ended
    assert second.gather("b") == ["a", "b"]
    waits.join(10)
    assert ended == [["a", "b"]]


def test_a_state_from_before_the_process_group_is_seen_after_it(tmp_path: Path, rendezvous: Rendezvous) -> None:
    first, second = meetings(tmp_path)
    first.say({"end": "waits"})
    assert second.said() == [None, None]
    for rank, meeting in enumerate((first, second)):
        rendezvous.become(rank)
        meeting.open()
    assert sees(second, {"end": "waits"}, None)


def test_nothing_of_a_process_group_is_kept_while_the_program_joins_another(
    tmp_path: Path, rendezvous: Rendezvous
) -> None:
    first, second = meetings(tmp_path, rendezvous)
    watching = distributed.TCPStore("127.0.0.1", rendezvous.stores[0].port, is_master=False, wait_for_workers=False)
    with first.apart():
        with second.apart():
            rendezvous.serve()
            with pytest.raises(distributed.DistNetworkError):
                watching.check(["the old one"])
            rendezvous.become(1)
        rendezvous.become(0)
    assert gathered([first, second], ["a", "b"]) == [["a", "b"]] * 2


def test_a_rank_of_a_process_group_without_a_store_does_not_see_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", distributed.Store)
    meeting = meetings(tmp_path)[1]
    meeting.open()
    assert meeting.gather("mine") is None


def test_a_rank_that_has_never_had_a_process_group_sees_itself_alone(tmp_path: Path) -> None:
    meeting = meetings(tmp_path)[1]
    assert meeting.gather("mine") == ["mine"]
    assert meeting.said() == [None, None]


def test_ranks_with_a_common_folder_meet_in_files(tmp_path: Path) -> None:
    states = [str(tmp_path / f"state{rank}.json") for rank in range(RANKS)]
    failures = [str(tmp_path / f"failure{rank}") for rank in range(RANKS)]
    ranks = [RankConsensus(FolderMailbox(states), rank, failures) for rank in range(RANKS)]
    assert gathered(ranks, ["a", "b"]) == [["a", "b"]] * 2
    Path(failures[1]).touch()
    assert ranks[0].gather("c") is None
