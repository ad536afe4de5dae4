"""Which `zerotune up` runs: a record that was left behind names nobody."""

import json
import os
from pathlib import Path

import pytest

from flows.servers.running_servers import hold, start_of, stop, up_folder
from trial_lib.wire.errors import InputError


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def write_record(pid: int, start: str) -> None:
    (up_folder() / "up.json").write_text(json.dumps({"pid": pid, "start": start}))


def test_where_nothing_runs_there_is_nothing_to_stop() -> None:
    assert not stop()
    # Left behind by one that was killed, and its number has gone to another process since: this one.
    write_record(os.getpid(), start_of(os.getpid()))
    assert not stop()


def test_there_is_one_at_a_time() -> None:
    with hold():
        with pytest.raises(InputError, match="zerotune up: it is already running"), hold():
            pass
        record = json.loads((up_folder() / "up.json").read_text())
        assert record == {"pid": os.getpid(), "start": start_of(os.getpid())}
    with hold():
        pass


def test_another_process_with_the_number_of_the_record_is_left_alone() -> None:
    with hold():
        # SIGTERM would end this test.
        write_record(os.getpid(), "another")
        with pytest.raises(InputError, match="did not stop within 0 s"):
            stop(timeout_s=0.3)


def test_the_start_of_a_process_is_the_same_whatever_its_name() -> None:
    before, shown = start_of(os.getpid()), Path("/proc/self/comm")
    name = shown.read_text()
    shown.write_text("a) 0 (b")
    try:
        assert start_of(os.getpid()) == before
    finally:
        shown.write_text(name.strip())
