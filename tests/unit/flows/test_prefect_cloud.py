"""What the doctor says of Prefect Cloud, which has no version to compare."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLOUD_API_URL, temporary_settings

from zerotune.flows.doctor import check_prefect
from zerotune.trial_lib.doctor import Verdict


class _Cloud(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path.endswith("version") else 200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"true")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_prefect_cloud_answers_and_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), _Cloud) as cloud:
        threading.Thread(target=cloud.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{cloud.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLOUD_API_URL: url}):
            check, server_time, _ = check_prefect()
        cloud.shutdown()
    assert check.verdict is Verdict.OK, check.said
    assert f"{url} answers" in check.said
    assert server_time is not None
