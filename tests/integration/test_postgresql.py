"""A study against servers as a team runs them: Prefect on PostgreSQL, MLflow on PostgreSQL with an artifact store."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from postgresql_fixtures import PostgreSQL, postgresql
from server_fixtures import Server, assert_whole_and_once, mlflow_server, prefect_server
from study_fixtures import BIN, Zerotune

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Team:
    """The servers, and a study that has run against them."""

    database: PostgreSQL
    mlflow: Server
    prefect: Server
    artifacts: Path
    zerotune: Zerotune
    ended: subprocess.CompletedProcess[str]

    @property
    def environment(self) -> dict[str, str]:
        """What names the servers."""
        return {"PREFECT_API_URL": f"{self.prefect.url}/api", "MLFLOW_TRACKING_URI": self.mlflow.url}


def test_databases_of_others_on_the_server_that_pghost_names_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgresql() as theirs:
        theirs.new_database("mlflow")
        login, _, place = theirs.address.rpartition("@")
        user, _, password = login.partition(":")
        host, _, port = place.rpartition(":")
        for name, value in {"PGHOST": host, "PGPORT": port, "PGUSER": user, "PGPASSWORD": password}.items():
            monkeypatch.setenv(name, value)
        with postgresql() as named:
            named.new_database("mlflow")
            # As of a server that was killed a moment ago.
            still_open = named.connect(f"{named.prefix}mlflow")
        still_open.close()
        every = "select datname from pg_database"
        names = {name for (name,) in theirs.query("mlflow", every)}
        assert f"{theirs.prefix}mlflow" in names
        assert not [name for name in names if name.startswith(named.prefix)]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder = tmp_path_factory.mktemp("team")
    with postgresql() as database:
        servers = [
            mlflow_server(folder / "mlflow", f"postgresql+psycopg2:{database.new_database('mlflow')}"),
            prefect_server(folder / "prefect", f"postgresql+asyncpg:{database.new_database('prefect')}"),
        ]
        try:
            mlflow, prefect = (server.wait_until_ready() for server in servers)
            work = tmp_path_factory.mktemp("work")
            zerotune = Zerotune(work, folder / "home")
            named = {"PREFECT_API_URL": f"{prefect.url}/api", "MLFLOW_TRACKING_URI": mlflow.url}
            ended = zerotune.run("binary", "-mt", "4", "-z", "1", "-mct", "1", **named)
            yield Team(database, mlflow, prefect, folder / "mlflow" / "artifacts", zerotune, ended)
        finally:
            for server in servers:
                server.kill()


def test_the_study_finds_its_answer(team: Team) -> None:
    assert team.ended.returncode == 0, team.ended.stderr
    assert "Some records have not reached MLflow" not in team.ended.stderr
    assert not (team.zerotune.folder / "mlflow.db").exists()


def test_prefect_s_history_is_complete_in_postgresql(team: Team) -> None:
    study = team.zerotune.study
    assert team.database.query("prefect", "select name, state_type from flow_run") == [
        (study.record["study_id"], "COMPLETED")
    ]
    tasks = team.database.query("prefect", "select name, state_type from task_run")
    trials = sorted(name for name, _ in tasks if name.startswith("trial-"))
    assert [int(name[6:10]) for name in trials] == sorted(study.results)
    assert {state for _, state in tasks} == {"COMPLETED"}
    keys = {key for (key,) in team.database.query("prefect", "select distinct key from artifact")}
    assert {"leaderboard", "progress", "profile", "best-configuration"} <= keys


def test_mlflow_has_parent_children_and_artifacts_through_its_server(team: Team) -> None:
    study = team.zerotune.study
    parent = assert_whole_and_once(team.mlflow.url, study.record["name"], study.results)
    assert parent.info.status == "FINISHED"
    assert parent.info.artifact_uri.startswith("mlflow-artifacts:")
    client = MlflowClient(tracking_uri=team.mlflow.url)
    assert "best_ds_config.json" in {file.path for file in client.list_artifacts(parent.info.run_id)}
    kept = list(team.artifacts.rglob("best_ds_config.json"))
    assert [file.read_bytes() for file in kept] == [study.paths.best_ds_config.read_bytes()]
    (count,) = team.database.query("mlflow", "select count(*) from runs")
    assert count == (len(study.results) + 1,)


def test_sending_it_again_changes_nothing(team: Team) -> None:
    study = team.zerotune.study
    before = team.database.query("mlflow", "select count(*) from metrics")
    ended = team.zerotune.run("sync", study.paths.root, **team.environment)
    assert ended.returncode == 0, ended.stderr
    assert_whole_and_once(team.mlflow.url, study.record["name"], study.results)
    assert team.database.query("mlflow", "select count(*) from metrics") == before


def test_sent_to_the_database_itself_its_artifacts_are_beside_the_studies(team: Team) -> None:
    study = team.zerotune.study
    store = f"postgresql+psycopg2:{team.database.new_database('without_server')}"
    ended = team.zerotune.run("sync", study.paths.root, MLFLOW_TRACKING_URI=store)
    assert ended.returncode == 0, ended.stderr
    kept = list((team.zerotune.folder / "mlartifacts").rglob("best_ds_config.json"))
    assert [file.read_bytes() for file in kept] == [study.paths.best_ds_config.read_bytes()]
    assert not (team.zerotune.folder / "mlruns").exists()


def test_the_doctor_finds_both_servers_and_their_versions(team: Team) -> None:
    ended = subprocess.run(
        [str(BIN / "zerotune"), "doctor", "--json"],
        cwd=team.zerotune.folder,
        env={**team.zerotune.environment, **team.environment},
        capture_output=True,
        text=True,
    )
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    for name, server in (("Prefect", team.prefect), ("MLflow", team.mlflow)):
        assert checks[name]["verdict"] == "ok", checks[name]
        assert f"{server.url}" in checks[name]["said"]
        assert " there, " in checks[name]["said"]
    assert "agrees with the Prefect server's" in checks["clock"]["said"]
