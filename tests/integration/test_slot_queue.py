"""The queue for a host's slots, with processes that wait, hold and die."""

import itertools
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from case_fixtures import quick_first

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.slots import held_slots

pytestmark = pytest.mark.alone

SPAWN = multiprocessing.get_context("spawn")
HOST = Host("cpu", ["0", "1", "2", "3"], 2**30)
SIZES = (2, 1, 4, 1, 1, 3, 2, 1, 4, 1, 2, 1)
HELD_S = (0.4, 0.2, 0.3, 0.5, 0.2, 0.3, 0.4, 0.2, 0.2, 0.3, 0.2, 0.2)
# Each handing over takes a look of the next one's.
LOOK_S = 0.15


def never() -> bool:
    return False


def take_turn(lock_dir: Path, count: int, seconds: float, told: Connection) -> None:
    """Waits for slots and keeps them for some seconds. Sends when it waits, has them, and has given them back."""
    is_told = False

    def tell(wait: object) -> None:
        nonlocal is_told
        if not is_told:
            told.send(wait)
        is_told = True

    with held_slots(lock_dir, HOST, count, never, tell):
        told.send(time.monotonic())
        time.sleep(seconds)
    told.send(time.process_time())


class Waiter:
    """A process in the queue. It waits when this has returned."""

    def __init__(self, lock_dir: Path, count: int, seconds: float) -> None:
        self.told, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=take_turn, args=(lock_dir, count, seconds, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.wait = self.told.recv()

    def has_slots_at(self) -> float:
        assert self.told.poll(30), "it never gets its slots"
        at = self.told.recv()
        assert isinstance(at, float)
        return at


def first_come_first_served(begins: float) -> list[float]:
    """Returns when each would have its slots if none began before an earlier one."""
    free_at, starts = [begins] * len(HOST.slots), []
    for count, seconds in zip(SIZES, HELD_S, strict=True):
        free_at.sort()
        begins = max(begins, free_at[count - 1])
        free_at[:count] = [begins + seconds] * count
        starts.append(begins)
    return starts


@pytest.mark.long
def test_of_twelve_waiters_none_waits_longer_than_those_before_it_take(tmp_path: Path) -> None:
    with held_slots(tmp_path, HOST, 4, never):
        waiters = [Waiter(tmp_path, *each) for each in zip(SIZES, HELD_S, strict=True)]
        begins = time.monotonic()
    assert [waiter.wait.place for waiter in waiters] == list(range(1, 13))
    starts = [waiter.has_slots_at() for waiter in waiters]
    late = [start - due for start, due in zip(starts, first_come_first_served(begins), strict=True)]
    assert all(seconds < LOOK_S * (place + 1) for place, seconds in enumerate(late)), late
    # Nothing that came after a trial of all slots passes it.
    for wide in (2, 8):
        assert all(start < starts[wide] for start in starts[:wide])
        assert all(start > starts[wide] for start in starts[wide + 1 :])
    for waiter in waiters:
        waiter.process.join()


@pytest.mark.long
def test_a_wait_costs_next_to_no_processor_time(tmp_path: Path) -> None:
    with held_slots(tmp_path, HOST, 4, never):
        waiters = [Waiter(tmp_path, 4, 0.0) for _ in range(3)]
        begun = [sum(cpu_of(waiter)) for waiter in waiters]
        time.sleep(2.5)
        used = [sum(cpu_of(waiter)) - before for waiter, before in zip(waiters, begun, strict=True)]
    assert max(used) < 0.1, used
    for waiter in waiters:
        waiter.process.join()


def cpu_of(waiter: Waiter) -> tuple[float, float]:
    psutil = pytest.importorskip("psutil")
    times = psutil.Process(waiter.process.pid).cpu_times()
    return times.user, times.system


@pytest.mark.parametrize("killed", quick_first(1, ["the holder", "the first waiter"]))
def test_when_a_process_is_killed_the_queue_goes_on_in_its_order(tmp_path: Path, killed: str) -> None:
    with held_slots(tmp_path, HOST, 2, never):
        holder = Waiter.__new__(Waiter)
        holder.told, theirs = SPAWN.Pipe()
        holder.process = SPAWN.Process(target=take_turn, args=(tmp_path, 2, 600.0, theirs), daemon=True)
        holder.process.start()
        holder.has_slots_at()
        waiters = [Waiter(tmp_path, count, 0.2) for count in (4, 1, 1)]
        assert waiters[0].wait.holders[-1][0].endswith(f"(pid {holder.process.pid})")
        if killed == "the first waiter":
            waiters.pop(0).process.kill()
            # One slot would be enough for the second, and both are held.
            assert not waiters[0].told.poll(0.3)
        holder.process.kill()
        began = time.monotonic()
    starts = [waiter.has_slots_at() - began for waiter in waiters]
    assert starts[0] < 0.5
    # The last two have room at once, and each says so when it is scheduled: none passes the wide one before them.
    assert starts[0] == min(starts) or killed == "the first waiter"
    for earlier, later in itertools.pairwise(sorted(starts)):
        assert later - earlier < 0.7
    for waiter in waiters:
        waiter.process.join()
