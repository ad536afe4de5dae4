"""What the doctor says of MLflow's servers and stores."""

import socket
import sqlite3
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from zerotune.trial_lib.doctor import Check, Verdict, check_mlflow

_ASKED: list[str | None] = []


class _Mlflow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        _ASKED.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"3.1.0")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class _Other(_Mlflow):
    def do_GET(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH\r\n")


@contextmanager
def server(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd.server_port
        httpd.shutdown()


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Check]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def look(uri: str) -> Check:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        return check_mlflow(tmp_path)

    return look


def test_the_password_of_an_address_is_sent_as_mlflow_sends_it_and_not_shown(check: Callable[[str], Check]) -> None:
    with server(_Mlflow) as port:
        found = check(f"http://me:se%40cret@127.0.0.1:{port}")
    assert _ASKED[-1] == f"Basic {b64encode(b'me:se@cret').decode()}"
    assert f"http://me:***@127.0.0.1:{port}" in found.said
    assert "cret" not in found.said + found.remedy


def test_what_is_no_server_of_mlflow_or_no_address_is_told_without_the_password(check: Callable[[str], Check]) -> None:
    with server(_Other) as port, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for place in (f"127.0.0.1:{port}", f"127.0.0.1:{unused.getsockname()[1]}", "127.0.0.1:port"):
            found = check(f"http://me:secret@{place}")
            assert found.verdict is Verdict.FAIL
            assert "does not answer" in found.said
            assert "secret" not in found.said + found.remedy


def test_a_store_that_is_there_or_can_be_made_is_well_and_is_left_as_it_is(
    check: Callable[[str], Check], tmp_path: Path
) -> None:
    assert check("").verdict is Verdict.OK
    assert check(f"sqlite:///{tmp_path}/not/yet/mlflow.db").verdict is Verdict.OK
    assert list(tmp_path.iterdir()) == []
    with sqlite3.connect(tmp_path / "mlflow.db") as connection:
        connection.execute("create table runs (id)")
    before = (tmp_path / "mlflow.db").read_bytes()
    assert check("").verdict is Verdict.OK
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("mlflow.db", before)]


@pytest.mark.parametrize(("store", "why"), [("bad.db", "not a database"), ("bad.db/mlflow.db", "Not a directory")])
def test_what_is_no_store_and_cannot_become_one_fails(
    check: Callable[[str], Check], tmp_path: Path, store: str, why: str
) -> None:
    (tmp_path / "bad.db").write_text("a text, and a long one: " * 100)
    found = check(f"sqlite:///{tmp_path}/{store}")
    assert found.verdict is Verdict.FAIL
    assert why in found.said
    assert "zerotune sync" in found.remedy


def test_databricks_is_not_looked_at(check: Callable[[str], Check]) -> None:
    found = check("databricks")
    assert found.verdict is Verdict.WARN
    assert "was not checked" in found.said
