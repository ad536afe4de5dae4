"""Which `zerotune up` runs: a record that was left behind names nobody."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from zerotune.flows import prefect_server
from zerotune.flows.prefect_server import hold, log_in, record_servers, shell_file, start_of, stop, up_folder
from zerotune.flows.terminal import say_ways
from zerotune.trial_lib.messages.errors import InputError


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


def test_another_process_with_the_number_of_the_record_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_server, "_RECORDED_S", 0.2)
    with hold():
        # SIGTERM would end this test.
        write_record(os.getpid(), "another")
        with pytest.raises(InputError, match=r"a process that is no `zerotune up` keeps .*/up/lock locked"):
            stop()


def test_a_lock_that_another_program_holds_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_server, "_RECORDED_S", 0.2)
    with (up_folder() / "lock").open("w") as foreign:
        fcntl.flock(foreign, fcntl.LOCK_EX)
        for refused in (hold().__enter__, stop):
            with pytest.raises(InputError, match=r"a process that is no `zerotune up` keeps .*/up/lock locked"):
                refused()


def test_one_that_does_not_hear_is_told_with_the_way_to_kill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    with hold(), pytest.raises(InputError, match=f"did not stop within 0 s.*kill -9 {os.getpid()}"):
        stop(timeout_s=0.3)


API, MLFLOW, CREDENTIAL = "http://127.0.0.1:4200/api", "http://127.0.0.1:5000", "zerotune:the-key"
LOGINS = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


def logged_in(monkeypatch: pytest.MonkeyPatch, **named: str) -> dict[str, str]:
    """Returns what a command adds to its environment, in which the user has named these servers."""
    monkeypatch.setattr(os, "environ", {"XDG_DATA_HOME": os.environ["XDG_DATA_HOME"], **named})
    log_in()
    return {name: os.environ[name] for name in LOGINS if name in os.environ}


def test_a_command_has_the_credential_only_for_the_servers_that_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with hold():
        record_servers(API, MLFLOW, CREDENTIAL)
        prefect = {"PREFECT_API_AUTH_STRING": CREDENTIAL}
        mlflow = {"MLFLOW_TRACKING_USERNAME": "zerotune", "MLFLOW_TRACKING_PASSWORD": "the-key"}
        assert logged_in(monkeypatch, PREFECT_API_URL=API, HTTP_PROXY="http://proxy.example") == prefect
        assert os.environ["NO_PROXY"] == "127.0.0.1"
        assert logged_in(monkeypatch, PREFECT_API_URL=f"{API}/", MLFLOW_TRACKING_URI=MLFLOW) == {**prefect, **mlflow}
        assert logged_in(monkeypatch, PREFECT_API_URL="http://localhost:4200/api") == prefect
        # A proxy is passed by under this name only.
        assert os.environ["PREFECT_API_URL"] == API
        # The user's own servers get nothing, and what the user has set for them stays.
        assert logged_in(monkeypatch) == {}
        assert logged_in(monkeypatch, PREFECT_API_URL="http://127.0.0.1:4201/api") == {}
        own = {"PREFECT_API_AUTH_STRING": "my:own"}
        assert logged_in(monkeypatch, PREFECT_API_URL="http://team.example/api", MLFLOW_TRACKING_URI=API, **own) == own
    # It has ended. Another user may listen there now.
    assert logged_in(monkeypatch, PREFECT_API_URL=API, MLFLOW_TRACKING_URI=MLFLOW) == {}


def test_a_shell_reads_a_file_that_only_the_owner_may_read() -> None:
    with hold():
        record_servers(API, MLFLOW, CREDENTIAL)
        assert shell_file().stat().st_mode & 0o777 == 0o600
        assert f"export PREFECT_API_URL={API} PREFECT_API_AUTH_STRING={CREDENTIAL}\n" in shell_file().read_text()
    assert not shell_file().exists()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_links_log_a_browser_in_unless_a_log_would_keep_them(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "the-key")
    pages = ["http://127.0.0.1:4200", f"{MLFLOW}/#/experiments/1", "http://127.0.0.1:50001/#/", "/a/file"]
    with hold():
        record_servers(API, MLFLOW, CREDENTIAL)
        for page in pages:
            say_ways("It is at", (page,), width=9)
    links = ["http://127.0.0.1:4200/enter#the-key", f"{MLFLOW}/enter#the-key/#/experiments/1", *pages[2:]]
    assert capsys.readouterr().err.splitlines() == [f"It is at {link}" for link in (links if is_terminal else pages)]


def test_the_start_of_a_process_is_the_same_whatever_its_name() -> None:
    before, shown = start_of(os.getpid()), Path("/proc/self/comm")
    name = shown.read_text()
    shown.write_text("a) 0 (b")
    try:
        assert start_of(os.getpid()) == before
    finally:
        shown.write_text(name.strip())
