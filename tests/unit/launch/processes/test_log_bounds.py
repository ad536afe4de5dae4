"""A log that grows without end keeps its head and its tail."""

import os
import re
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes import watchdog


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MOST_LOG_BYTES", 1000)
    monkeypatch.setattr(watchdog, "KEPT_LOG_BYTES", 100)


@pytest.mark.parametrize("line", [b"%07d\n", b"%08d"], ids=["lines", "one line without end"])
def test_head_and_tail_stay_and_what_is_missing_is_counted(line: bytes, tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    rank = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    printed = b"".join(line % number for number in range(1000))
    for start in range(0, len(printed), 400):
        os.write(rank, printed[start : start + 400])
        watchdog.bound_logs([log])
        assert log.stat().st_size <= 1000
    os.close(rank)
    kept = log.read_bytes()
    head, notice, tail = re.split(rb"\n(\[ZeroTune .*\])\n", kept)
    assert (head, tail) == (printed[:100], printed[-len(tail) :])
    assert len(tail) >= 100
    missing = re.search(rb"\d+", notice)
    assert missing is not None
    assert int(missing[0]) == len(printed) - len(head) - len(tail)


def test_a_short_log_stays_and_a_missing_one_is_none(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"x" * 1000)
    watchdog.bound_logs([log, tmp_path / "removed" / "rank1.log"])
    assert log.read_bytes() == b"x" * 1000


def test_a_launch_has_the_logs_of_all_its_sizes() -> None:
    request = {
        "ranks": [{"log": "a"}, {"log": "b"}],
        "payload": {"sizes": [{"logs": ["a", "b"]}, {"logs": ["c", "d"]}]},
    }
    assert watchdog.logs_of(request) == list(map(Path, "abcd"))
    assert watchdog.logs_of({"ranks": [{"log": "a"}], "payload": {"log": "a"}}) == [Path("a")]
