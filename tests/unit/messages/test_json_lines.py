"""JSON lines that one process appends and others read as the file grows."""

import json
import resource
import signal
import stat
from pathlib import Path

import pytest

from zerotune.trial_lib.messages.files import LineReader, append, drop_torn_tail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_each_line_is_read_once_and_when_it_is_whole(path: Path) -> None:
    reader = LineReader(path)
    assert list(reader.read()) == []
    append(path, '{"a": 1}')
    path.write_bytes(path.read_bytes() + b'{"b": ')
    (line,) = reader.read()
    assert (line.number, json.loads(line.content), line.end) == (1, {"a": 1}, 9)
    path.write_bytes(path.read_bytes() + b"2}\n")
    (line,) = reader.read()
    assert (line.number, json.loads(line.content), line.end) == (2, {"b": 2}, reader.end)
    assert list(reader.read()) == []


def test_a_line_whose_reading_raises_is_read_again(path: Path) -> None:
    for number in range(3):
        append(path, str(number))
    reader = LineReader(path)
    with pytest.raises(ZeroDivisionError):
        [1 / (1 - int(line.content)) for line in reader.read()]
    assert [(line.number, line.content) for line in reader.read()] == [(2, b"1"), (3, b"2")]


def test_only_a_newline_ends_a_line(path: Path) -> None:
    append(path, json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    assert [json.loads(line.content)["text"] for line in LineReader(path).read()] == ["a\u2028b\x85c"]


def test_a_new_file_is_its_owners_alone_unless_a_mode_is_given(tmp_path: Path) -> None:
    append(tmp_path / "own", "1", fsync=True)
    append(tmp_path / "given", "1", mode=0o640)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "given")]
    assert modes == [0o600, 0o640]


def test_a_full_disk_leaves_no_part_of_a_line(path: Path) -> None:
    append(path, '{"a": 1}')
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    received = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, hard))
        with pytest.raises(OSError, match=r"File too large|No space left"):
            append(path, '{"b": "no room for this"}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, received)
    assert path.read_bytes() == before


@pytest.mark.parametrize("torn", ["", "{", '{"kind": "trai', "x" * 10_000])
def test_a_torn_line_is_dropped_so_that_the_next_begins_on_its_own(path: Path, torn: str) -> None:
    path.write_text("1\n" + torn)
    drop_torn_tail(path)
    assert path.read_text() == "1\n"
    append(path, "2")
    assert [line.content for line in LineReader(path).read()] == [b"1", b"2"]


def test_a_file_that_is_one_torn_line_becomes_empty_and_a_missing_one_stays_away(path: Path) -> None:
    drop_torn_tail(path)
    assert not path.exists()
    path.write_text("{")
    drop_torn_tail(path)
    assert path.read_text() == ""
