"""The history of a study: what is written is what is read, also after a crash in the middle of a line."""

import dataclasses
import json
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.folder import FolderError
from zerotune.trial_lib.study.history import (
    Asked,
    AskedSweep,
    Event,
    History,
    HistoryReader,
    Stopped,
    Told,
    Withdrawn,
    read_history,
)

CANDIDATE = Candidate(knobs={"zero_optimization": {"stage": 2}}, micro_batch_size=4, slots=2, data_parallel_size=2)
RESULT = TrialResult(
    trial_id="study-0002",
    number=2,
    purpose=Purpose.SEARCH,
    config_hash="abc",
    outcome=Outcome.COMPLETED,
    metrics={"latency": 0.1},
    memory=Memory(peak=[1, 2]),
    profile=ModelProfile(
        num_params=1,
        trainable_num_params=1,
        activation_mem_per_gpu=1,
        gpu_mem=1,
        data_parallel_size=1,
        flops_per_sample=1.5,
    ),
    started_at=12.5,
)
LARGER = CANDIDATE.model_copy(update={"micro_batch_size": 8})
EVENTS: list[Event] = [
    Asked(0, Purpose.PROFILE, CANDIDATE),
    Told(0, replace(RESULT, number=0, purpose=Purpose.PROFILE)),
    Asked(2, Purpose.SEARCH, CANDIDATE),
    Told(2, RESULT),
    AskedSweep(3, Sweep((CANDIDATE, LARGER), bytes_per_sample=1e6, headroom=0.05)),
    Withdrawn(4, Withdrawal.MEMORY),
    Stopped("the search has ended — über"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    history = History(tmp_path / "history.jsonl")
    for event in EVENTS:
        history.append(event)
    return tmp_path / "history.jsonl"


def test_events_are_read_as_they_were_written_in_order(path: Path) -> None:
    assert read_history(path) == EVENTS
    assert History(path).replayed == EVENTS


def test_each_event_is_one_line_of_json(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == [
        *("ask", "tell", "ask", "tell"),
        *("sweep", "withdraw", "stop"),
    ]


def test_the_profile_trial_may_be_asked_for_anew_until_it_has_ended(tmp_path: Path) -> None:
    asked, told = EVENTS[:2]
    assert isinstance(asked, Asked)
    larger = dataclasses.replace(asked, candidate=LARGER)
    history = History(tmp_path / "history.jsonl")
    for event in (asked, larger, told):
        history.append(event)
    assert read_history(tmp_path / "history.jsonl") == [asked, larger, told]
    history.append(larger)
    with pytest.raises(InputError, match="line 4: This line asks for trial 0, but an earlier line has asked for it"):
        read_history(tmp_path / "history.jsonl")


def test_the_trials_of_a_sweep_have_numbers_in_a_row() -> None:
    sweep = AskedSweep(7, Sweep((CANDIDATE, LARGER), bytes_per_sample=1e6, headroom=0.05))
    assert sweep.numbered == [(7, CANDIDATE), (8, LARGER)]


def test_a_history_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none.jsonl") == []


def test_a_torn_last_line_is_dropped_wherever_it_was_torn(path: Path) -> None:
    whole = path.read_bytes()
    last_begins = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last_begins, len(whole)):
        path.write_bytes(whole[:end])
        assert read_history(path) == EVENTS[:-1]


@pytest.mark.parametrize("damage", [b"\0" * 40 + b"\n", b"{}\n", b'{"tell": 3, "result": {}}\n'])
def test_a_damaged_line_before_the_last_is_named(path: Path, damage: bytes) -> None:
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + b"".join(others))
    with pytest.raises(InputError, match="line 2: This line is damaged"):
        read_history(path)


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (lambda lines: [*lines[:2], *lines[3:]], 3, "has the end of trial 2, but no earlier line asks for it"),
        (
            lambda lines: [*lines[:4], lines[3], *lines[4:]],
            5,
            "has the end of trial 2, but an earlier line has it already",
        ),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4, "asks for trial 2, but an earlier line has asked for it"),
        (lambda lines: [lines[0], *lines[2:]], 2, "no earlier line has the end of the profile trial"),
        (lambda lines: [*lines[:2], *lines[4:]], 3, "asks for trial 3, but trial 2 comes next"),
        (lambda lines: [*lines[:6], lines[5]], 7, "has the end of trial 4, but an earlier line has it already"),
        (lambda lines: [lines[0], lines[1].replace(b'"tell": 0', b'"tell": true'), *lines[2:]], 2, "is damaged"),
        (lambda lines: [lines[0], lines[1].replace(b'"number": 0', b'"number": 7'), *lines[2:]], 2, "of trial 7"),
        (lambda lines: [lines[0], b'"ask"\n', *lines[1:]], 2, "is damaged"),
        (lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[1:]], 2, "is damaged"),
    ],
)
def test_a_line_that_is_missing_or_stands_twice_is_named(
    path: Path, change: Callable[[list[bytes]], list[bytes]], line: int, said: str
) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(InputError, match=f"line {line}: .*{said}"):
        read_history(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_history(tmp_path / "history.jsonl")


def test_a_full_disk_leaves_no_part_of_a_line(path: Path) -> None:
    history = History(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    received = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, hard))
        with pytest.raises(OSError, match=r"File too large|No space left"):
            history.append(Stopped("no room for this"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, received)
    assert path.read_bytes() == before


def test_what_is_appended_after_a_torn_line_is_read(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    history = History(path)
    history.append(Stopped("again"))
    assert read_history(path) == [*EVENTS[:-1], Stopped("again")]


def test_reading_does_not_mend_the_file_that_another_process_writes(path: Path) -> None:
    torn = path.read_bytes()[:-5]
    path.write_bytes(torn)
    read_history(path)
    assert path.read_bytes() == torn


def test_a_reader_is_given_each_event_once_however_the_file_grows(path: Path, tmp_path: Path) -> None:
    whole, growing = path.read_bytes(), tmp_path / "growing.jsonl"
    reader = HistoryReader(growing)
    assert reader.read() == []
    seen = []
    for end in range(0, len(whole) + 1, 37):
        growing.write_bytes(whole[:end])
        seen += reader.read()
    growing.write_bytes(whole)
    assert [*seen, *reader.read()] == EVENTS
    assert reader.end == len(whole)
    growing.write_bytes(whole + b"{}\n")
    with pytest.raises(InputError, match=f"line {len(EVENTS) + 1}: This line is damaged"):
        reader.read()


@given(reason=st.text())
def test_any_reason_stays_one_line(tmp_path_factory: pytest.TempPathFactory, reason: str) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    history = History(path)
    history.append(Stopped(reason))
    history.append(Stopped("next"))
    assert read_history(path) == [Stopped(reason), Stopped("next")]


@pytest.mark.parametrize("left", [None, 0, 100])
def test_nothing_is_added_to_a_history_that_has_lost_lines(left: int | None, path: Path) -> None:
    history = History(path)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    before = path.exists() and path.read_bytes()
    with pytest.raises(FolderError, match=r"was removed or cut while the study ran.*zerotune resume"):
        history.append(EVENTS[0])
    assert (path.exists() and path.read_bytes()) == before
