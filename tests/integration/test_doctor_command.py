"""`zerotune doctor` on this machine as it is, and on one where everything that usually goes wrong has."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_fixtures import free_port
from tls_fixtures import serve_by_https

from zerotune.flows.doctor import check_prefect
from zerotune.trial_lib import doctor as builds
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.doctor import Verdict, check_mlflow
from zerotune.trial_lib.launch.processes import environment_check
from zerotune.trial_lib.messages.errors import InputError

BIN = Path(sys.executable).parent
IN_SECONDS = 30.0  # some five on an idle machine
FOREIGN = ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")


def doctor(folder: Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """Runs the command; returns its exit code and its document, with the checks by name."""
    own = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    began = time.monotonic()
    ended = subprocess.run(
        [str(BIN / "zerotune"), "doctor", "--json"],
        cwd=folder,
        env={**own, "HOME": str(folder), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - began < IN_SECONDS
    document = json.loads(ended.stdout)
    document["checks"] = {check["name"]: check for check in document["checks"]}
    return ended.returncode, document


def test_everything_that_is_broken_is_told_with_how_to_mend_it(tmp_path: Path) -> None:
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (tmp_path / "file").touch()
    before = set(tmp_path.rglob("*"))
    code, document = doctor(
        tmp_path,
        PATH=str(BIN),
        TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        PREFECT_API_URL=f"http://127.0.0.1:{free_port()}/api",
        MLFLOW_TRACKING_URI=f"http://127.0.0.1:{free_port()}",
        XDG_DATA_HOME=str(tmp_path / "file"),
    )
    checks = document["checks"]
    # The folder is Prefect's client's, which is imported where a server is configured.
    assert set(tmp_path.rglob("*")) - {tmp_path / ".prefect"} == before
    assert code == 1
    assert not document["healthy"]
    failed = {name for name, check in checks.items() if check["verdict"] == "fail"}
    assert {"build locks", "compiler", "Prefect", "MLflow", "data folder"} <= failed
    assert checks["build locks"]["remedy"] == f"rm {lock}"
    assert "build-essential" in checks["compiler"]["remedy"]
    assert "PREFECT_API_URL" in checks["Prefect"]["remedy"]
    assert "zerotune sync" in checks["MLflow"]["remedy"]
    assert "XDG_DATA_HOME" in checks["data folder"]["remedy"]
    for check in checks.values():
        assert bool(check["remedy"]) is (check["verdict"] != "ok"), check


@pytest.mark.long
def test_a_driver_that_hangs_does_not_hold_the_doctor_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("import time\n\ndef nvmlInit():\n    time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(builds, "_ANSWER_S", 3.0)
    with pytest.raises(InputError, match="the NVIDIA driver: it has not listed the GPUs within 3 s"):
        builds.devices()


def test_the_devices_are_those_of_this_process() -> None:
    found = builds.devices()
    assert found.host == this_host()
    assert (found.driver is not None) or found.host.device == "cpu"


@pytest.mark.long
def test_two_processes_that_reduce_together_are_tried_for_real() -> None:
    assert environment_check.reduced_together("cpu") == ""
    environment_check.compute("cpu")


@pytest.mark.long
def test_what_one_of_two_processes_says_is_told_and_not_that_the_other_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # A first device of a kind that is not there.
    assert "meta2" in environment_check.reduced_together("meta2")


def test_two_that_wait_for_each_other_for_ever_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_check, "_TOGETHER_S", 0.2)
    assert environment_check.reduced_together("cpu") == "it has not ended within 0 s"


@pytest.mark.long
def test_this_machine_is_healthy_and_nothing_is_written(tmp_path: Path) -> None:
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions"))
    code, document = doctor(tmp_path, TORCH_EXTENSIONS_DIR=extensions)
    checks = document["checks"]
    assert checks.keys() >= {
        *("accelerators", "environment", "ops", "build locks", "compiler", "shared memory"),
        *("studies", "data folder", "op builds", "locks", "Prefect", "MLflow", "clock"),
    }
    assert code == 0, document
    assert "torch" in checks["environment"]["said"]
    assert "deepspeed_shm_comm" in checks["ops"]["said"]
    assert list(tmp_path.iterdir()) == []


class Answers(BaseHTTPRequestHandler):
    """Says that it is Prefect 3.1 and MLflow 2.0; its clock is two minutes slow."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() - 120, usegmt=True)

    def do_GET(self) -> None:
        body = {"/api/admin/version": b'"3.1.0"', "/version": b"2.0.1"}.get(self.path, b"true")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def answering(server: HTTPServer) -> Iterator[str]:
    """Has a server answer in a thread; yields where it is."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def old_server() -> Iterator[str]:
    with answering(HTTPServer(("127.0.0.1", 0), Answers)) as place:
        yield f"http://{place}"


def test_servers_of_other_versions_and_the_prefect_servers_clock_are_told(
    old_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("PREFECT_API_URL", f"{old_server}/api")
    with temporary_settings({PREFECT_API_URL: f"{old_server}/api"}):
        prefect, server_time, asked_at = check_prefect()
    assert prefect.verdict is Verdict.WARN
    assert "Prefect 3.1.0 there" in prefect.said
    assert server_time is not None
    assert 118 < asked_at - server_time < 123
    monkeypatch.setenv("MLFLOW_TRACKING_URI", old_server)
    mlflow = check_mlflow(tmp_path)
    assert mlflow.verdict is Verdict.WARN
    assert "MLflow 2.0.1" in mlflow.said


def test_servers_of_a_private_network_are_trusted_as_their_clients_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import (
        PREFECT_API_SSL_CERT_FILE,
        PREFECT_API_TLS_INSECURE_SKIP_VERIFY,
        PREFECT_API_URL,
        temporary_settings,
    )

    server = HTTPServer(("127.0.0.1", 0), Answers)
    certificate = serve_by_https(server, tmp_path)
    with answering(server) as place:
        monkeypatch.setenv("PREFECT_API_URL", f"https://{place}/api")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"https://{place}")
        named = {PREFECT_API_URL: f"https://{place}/api"}
        trusting: dict[Any, Any]
        for trusting in ({PREFECT_API_SSL_CERT_FILE: str(certificate)}, {PREFECT_API_TLS_INSECURE_SKIP_VERIFY: True}):
            with temporary_settings({**named, **trusting}):
                assert "Prefect 3.1.0 there" in check_prefect()[0].said
        with temporary_settings(named):
            assert "does not answer" in check_prefect()[0].said
        assert "does not answer" in check_mlflow(tmp_path).said
        for name, value in (
            ("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate)),
            ("MLFLOW_TRACKING_INSECURE_TLS", "true"),
        ):
            with monkeypatch.context() as told:
                told.setenv(name, value)
                assert "MLflow 2.0.1" in check_mlflow(tmp_path).said


def test_a_database_that_does_not_answer_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://me:hidden@127.0.0.1:{free_port()}/mlflow")
    check = check_mlflow(tmp_path)
    assert check.verdict is Verdict.FAIL
    assert "hidden" not in check.said + check.remedy
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    assert check_mlflow(tmp_path).verdict is Verdict.FAIL
