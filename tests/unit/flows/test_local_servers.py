"""The servers of `zerotune up`: on loopback, whatever the user has set for servers of their own."""

import contextlib
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotune.flows import up
from zerotune.flows.prefect_server import HeldPort, ServerError, Service, migrate
from zerotune.flows.up import mlflow_service, prefect_service


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(up, "migrate_own_database", lambda: None)


@pytest.fixture
def port() -> Iterator[HeldPort]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    with contextlib.closing(HeldPort(number)) as port:
        yield port


def test_prefect_s_is_on_loopback_over_zerotune_s_own_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: HeldPort
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_HOST", "0.0.0.0")
    monkeypatch.setenv("PREFECT_API_URL", "http://elsewhere/api")
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "for:another")
    service = prefect_service(port, "me:key", tmp_path)
    assert service.command[-5:-2] == ["prefect", "--port", str(port.number)]
    assert service.environment["PREFECT_SERVER_API_HOST"] == "127.0.0.1"
    assert service.environment["PREFECT_SERVER_API_PORT"] == str(port.number)
    assert not {"PREFECT_API_URL", "PREFECT_SERVER_API_AUTH_STRING"} & service.environment.keys()
    assert service.environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == port.url
    assert str(tmp_path) in service.environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"]


def test_mlflow_s_over_a_team_s_database_keeps_artifacts_in_the_work_folder_and_the_password_to_itself(
    tmp_path: Path, port: HeldPort
) -> None:
    service = mlflow_service("postgresql+psycopg2://me:secret@host/mlflow", port, "me:key", tmp_path, Path("/team"))
    assert service is not None
    assert service.environment["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == "file:///team/mlartifacts"
    assert not {"secret", "key"} & set(re.findall(r"\w+", " ".join(service.command)))
    assert "secret" in service.environment["MLFLOW_BACKEND_STORE_URI"]


@pytest.mark.parametrize("store", ["http://host:5000", "databricks", "databricks://profile", "databricks-uc"])
def test_there_is_none_over_a_server(store: str, tmp_path: Path, port: HeldPort) -> None:
    assert mlflow_service(store, port, "me:key", tmp_path, tmp_path) is None


@pytest.mark.parametrize("shares_log", [False, True])
def test_a_log_of_its_own_begins_anew_and_one_that_others_write_to_goes_on(tmp_path: Path, shares_log: bool) -> None:
    log = tmp_path / "it.log"
    log.write_text("before\n")
    service = Service("It", ["echo", "now"], {"PATH": "/usr/bin:/bin"}, log, shares_log=shares_log)
    service.start()
    service.close()
    assert ("before" in log.read_text()) == shares_log
    assert service.log_before.exists() != shares_log


@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("print('first'); print('last'); raise SystemExit(3)", "last"),
        ("raise SystemExit(3)", "it printed nothing"),
    ],
)
def test_a_migration_that_fails_is_one_sentence_with_the_last_words_of_its_command(
    tmp_path: Path, program: str, last: str
) -> None:
    said = rf"^It could not migrate FILE to its schema \({last}\)\. Move it away\.$"
    with pytest.raises(ServerError, match=said):
        migrate(
            "It could not migrate FILE",
            [sys.executable, "-S", "-c", program],
            {},
            tmp_path,
            tmp_path / "migration.log",
            remedy="Move it away.",
        )


def test_a_migration_that_succeeds_leaves_its_log(tmp_path: Path) -> None:
    migrate("It", [sys.executable, "-S", "-c", "print('done')"], {}, tmp_path, tmp_path / "migration.log")
    assert (tmp_path / "migration.log").read_text() == "done\n"
