"""A study is sent to MLflow, and a damaged record is bad input."""

import socket
import threading
import time
from pathlib import Path

import pytest

from zerotune.flows import records
from zerotune.flows.records import sync_command
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import FullExperimentPaths, StudyPaths, StudyRecord


def written_study(folder: Path) -> StudyPaths:
    paths = StudyPaths(folder / "zerotune-studies" / "s-1")
    paths.trials.mkdir(parents=True)
    record = StudyRecord(study_id="s-1", name="hello", method="asha", metric="throughput")
    paths.record.write_text(record.model_dump_json())
    return paths


@pytest.mark.parametrize("paths", [StudyPaths, FullExperimentPaths])
def test_a_damaged_record_is_bad_input_and_nothing_is_sent(
    paths: type[StudyPaths] | type[FullExperimentPaths], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    root = tmp_path / "zerotune-studies" / "s-1"
    root.mkdir(parents=True)
    record = paths(root).record
    record.write_text('{"half":')
    with pytest.raises(InputError, match=f"{record}: .* record is damaged"):
        sync_command(root)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_study_that_was_sent_is_told_with_its_page(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    paths = written_study(tmp_path)
    assert sync_command(paths.root) == 0
    *_, sent, command, page = capsys.readouterr().err.splitlines()
    assert "has all records of s-1." in sent
    assert command == f"In MLflow:     mlflow ui --backend-store-uri {store}"
    assert page.split() == [*["then", "open:"], page.split()[-1]]
    assert page.endswith("&viewStateShareKey=s-1")


def test_a_server_that_answers_a_byte_at_a_time_is_given_up_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not over.wait(0.2):
                connection.sendall(b" ")

    paths = written_study(tmp_path)
    monkeypatch.setattr(records, "_SILENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listening.getsockname()[1]}")
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        began = time.monotonic()
        assert sync_command(paths.root) == 1
        over.set()
    assert time.monotonic() - began < 10
    did_not, again = capsys.readouterr().err.splitlines()[-2:]
    assert did_not.endswith("did not record it: no request was answered in full within 1 s")
    assert again == f"Nothing is lost. Try again later with: zerotune sync {paths.root}"
