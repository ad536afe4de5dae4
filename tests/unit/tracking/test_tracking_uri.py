import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from sqlalchemy import make_url

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import work_dir_of
from zerotune.trial_lib.tracking.tracking_uri import (
    artifact_location,
    default_tracking_uri,
    run_page,
    sqlite_file,
    trials_page,
    ways_to,
    without_password,
)


def test_the_default_is_a_database_in_the_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = default_tracking_uri(tmp_path)
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert sqlite_file(uri) == tmp_path / "mlflow.db"
    assert artifact_location(uri, tmp_path / "elsewhere") == f"file://{tmp_path}/mlartifacts"


@pytest.mark.parametrize("uri", ["http://localhost:5000", "postgresql://host/db", "sqlite:////w/r.db", "databricks"])
def test_the_usual_variable_wins(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert default_tracking_uri(tmp_path) == uri


def test_a_relative_database_is_in_the_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///kept/runs.db?timeout=5")
    assert default_tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/kept/runs.db?timeout=5"


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "./mlruns", "/tmp/mlruns"])
def test_a_file_store_is_refused(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(InputError, match="file store"):
        default_tracking_uri(tmp_path)


def test_a_server_decides_where_artifacts_go() -> None:
    assert artifact_location("http://localhost:5000", Path("/w")) is None
    assert artifact_location("databricks://profile", Path("/w")) is None


@pytest.mark.parametrize("uri", ["postgresql+psycopg2://host/db", "mysql://host/db"])
def test_artifacts_of_a_team_s_database_stay_in_the_work_folder(uri: str) -> None:
    assert artifact_location(uri, Path("/w")) == "file:///w/mlartifacts"


def test_a_run_on_a_server_has_a_page() -> None:
    [place] = ways_to("http://localhost:5000/", run_page("1", "ab"))
    assert place == "http://localhost:5000/#/experiments/1/runs/ab?workflowType=machine_learning"


def test_the_page_of_the_trials_opens_as_a_table_in_the_view_of_their_study() -> None:
    [place] = ways_to("http://localhost:5000", trials_page("1", "my model-1"))
    path, _, query = place.partition("?")
    assert path == "http://localhost:5000/#/experiments/1/runs"
    assert parse_qs(query) == {
        "workflowType": ["machine_learning"],
        "compareRunsMode": ["TABLE"],
        "viewStateShareKey": ["my model-1"],
    }


@pytest.mark.parametrize(("page", "path"), [(run_page("1", "ab"), run_page("1", "ab")), (None, "")])
def test_the_pages_of_a_database_are_those_of_the_server_that_is_started_first(page: str | None, path: str) -> None:
    command, place = ways_to("sqlite:////my work/mlflow.db", page)
    assert command == "mlflow ui --backend-store-uri 'sqlite:////my work/mlflow.db'"
    assert place == f"http://127.0.0.1:5000{path}"


@pytest.mark.parametrize("uri", ["http://host:5000", "databricks", "databricks://profile"])
def test_a_server_has_its_own_pages(uri: str) -> None:
    assert ways_to(uri, None) == (uri,)


def test_a_page_that_has_no_known_address_is_named_by_its_server() -> None:
    assert ways_to("databricks", run_page("1", "ab")) == ("databricks",)


def test_a_password_is_not_shown() -> None:
    assert without_password("https://me:secret@host/mlflow") == "https://me:***@host/mlflow"
    assert without_password("https://host:5000/of/me@here") == "https://host:5000/of/me@here"
    assert without_password("sqlite:////w/me:too@here.db") == "sqlite:////w/me:too@here.db"
    for unescaped in ("se/cret", "se#cret", "se?cret", "1/2@3", "a@b/c"):
        assert without_password(f"postgresql://me:{unescaped}@host/db") == "postgresql://me:***@host/db"
    assert without_password("mysql://host/db?user=me&password=secret&x=1") == "mysql://host/db?user=me&password=***&x=1"
    for uri in ("https://me:secret@host", "postgresql://me:secret@host/db"):
        assert "secret" not in " ".join(ways_to(uri, run_page("1", "ab")))


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    check = "import sys, zerotune.trial_lib.tracking.sync; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize("name", ["it's", "what?", "a#b", "100%", "a%20b", "two words", "ünï", "x" * 200])
def test_a_store_stands_in_its_folder_whatever_that_is_called(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert sqlite_file(default_tracking_uri(folder)) == folder / "mlflow.db"
    assert make_url(default_tracking_uri(folder)).database == str(folder / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs/my.db?timeout=5")
    assert sqlite_file(default_tracking_uri(folder)) == folder / "runs" / "my.db"
    assert make_url(default_tracking_uri(folder)).query == {"timeout": "5"}


def test_a_study_that_was_put_elsewhere_has_its_store_beside_it() -> None:
    assert work_dir_of(Path("/w/zerotune-studies/s-1")) == Path("/w")
    assert work_dir_of(Path("/w/zerotune-experiments/e-1")) == Path("/w")
    assert work_dir_of(Path("/backups/s-1")) == Path("/backups")


def test_in_an_environment_of_its_own_the_command_names_zerotunes_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).with_name("mlflow")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    command, _ = ways_to("sqlite:////data/mlflow.db", None)
    assert command == f"{own} ui --backend-store-uri sqlite:////data/mlflow.db"
