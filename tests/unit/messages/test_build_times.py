"""For how long a trial's ranks have built something: together, not each by itself."""

import os
from pathlib import Path

import pytest

from zerotune.trial_lib.messages import build_times


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ("", 0.0),
        ("a begins 10\na ends 13", 3.0),
        # Three ranks, of which two wait for the third, and one comes later.
        ("a begins 10\nb begins 11\na ends 13\nb ends 14\nc begins 20\nc ends 21", 5.0),
        ("a begins 10\na ends 13\na begins 15", 8.0),
        ("a begins 10\na ends 13\nhalf a li", 3.0),
        ("a begins 10\na ends", 10.0),
        ("a ends 13", 0.0),
        ("a begins -99999", 1800.0),
    ],
)
def test_what_ranks_do_at_the_same_time_counts_once_and_what_goes_on_until_now(
    lines: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = os.uname().nodename
    jumped = lines.replace("\n", f" 1e9\n{host}/") + (" 2e9" if lines[-1:].isdigit() else "")
    (tmp_path / "builds").write_text(lines and f"{host}/{jumped}")
    monkeypatch.setattr(build_times, "since_boot", lambda: 20.0)
    assert build_times.seconds(tmp_path) == seconds
    # Of several hosts, whose times since their boots differ.
    others = "".join(f"{line.replace(' ', '/1 ', 1)}\n" for line in lines.splitlines()).replace("s ", "s 7 ")
    (tmp_path / "builds").write_text(others)
    monkeypatch.setattr(build_times.time, "time", lambda: 20.0)
    assert build_times.seconds(tmp_path) == seconds


def test_where_nothing_was_built_or_nothing_can_be_noted_there_is_no_time(tmp_path: Path) -> None:
    assert build_times.seconds(tmp_path) == 0.0
    with build_times.noted(tmp_path / "not" / "there"):
        pass
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - names alone
