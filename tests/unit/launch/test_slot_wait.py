"""How a wait for slots is told: in sentences that become rare, in the trial's folder, and in its result."""

import itertools
import json
import time
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.slots import QueueWait, SlotWait
from zerotune.trial_lib.records.folders import TrialPaths

NOON = time.mktime((2026, 1, 1, 12, 0, 0, 0, 0, 0))


class Clock:
    """The time, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = self.jump = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)
        monkeypatch.setattr(time, "clock_gettime", lambda _: self.seconds)
        monkeypatch.setattr(time, "time", lambda: NOON + self.jump)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def wait(place: int = 2) -> QueueWait:
    return QueueWait(2, 8, place, (("one-0003 of anna (pid 7)", NOON - 60), ("two of ben (pid 8)", NOON - 1e6)))


def test_it_names_slots_place_holders_and_duration_and_the_words_become_rare(clock: Clock) -> None:
    notes: list[str] = []
    telling = SlotWait("trial 0003", notes.append)
    told_at = []
    for clock.seconds in range(0, 4000, 2):
        before = len(notes)
        telling.tell(wait())
        told_at += [clock.seconds] * (len(notes) - before)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOON - 1e6))
    what = "trial 0003 waits for 2 of 8 slots, place 2 in the queue. Held by one-0003 of anna (pid 7) since 11:59:00, "
    assert notes[0] == f"{what}two of ben (pid 8) since {since}."
    assert notes[2] == f"{notes[0]} It has waited 1 min 00 s."
    assert told_at[:6] == [0, 30, 60, 120, 240, 480]
    assert max(later - earlier for earlier, later in itertools.pairwise(told_at)) == 600


@pytest.mark.parametrize("jump", [0.0, 10 * 365 * 86400.0, -86400.0])
def test_its_file_is_there_only_while_it_lasts_and_the_result_keeps_it(
    jump: float, tmp_path: Path, clock: Clock
) -> None:
    notes: list[str] = []
    paths = TrialPaths(tmp_path)
    telling = SlotWait("trial 0003", notes.append, [paths])
    telling.tell(wait(2))
    telling.tell(wait(1))
    assert json.loads(paths.waiting.read_text())["waiting"].startswith("2 of 8 slots, place 1 in the queue. Held by ")
    clock.seconds, clock.jump = 85.0, jump
    telling.end(has_slots=True)
    assert not paths.waiting.exists()
    assert notes[-1] == "trial 0003 has its slots after a wait of 1 min 25 s"
    assert telling.waited is not None
    assert (telling.waited.seconds, telling.waited.place) == (85.0, 2)
    # A moment of another day has its date.
    assert telling.waited.holders[0].endswith("since 2026-01-01 11:59" if jump > 0 else "since 11:59:00")


def test_without_a_wait_there_is_nothing_to_tell(tmp_path: Path) -> None:
    notes: list[str] = []
    telling = SlotWait("trial 0003", notes.append, [TrialPaths(tmp_path)])
    telling.end(has_slots=True)
    assert (notes, telling.waited, list(tmp_path.iterdir())) == ([], None, [])
