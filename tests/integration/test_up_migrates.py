"""`zerotune up` brings its databases to this version's schema first: where there are none yet, and older ones."""

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from mlflow.store.db import utils as schema
from mlflow.store.tracking.dbmodels.initial_models import Base as InitialTables
from mlflow.tracking import MlflowClient
from server_fixtures import free_port
from study_fixtures import BIN, Zerotune

pytestmark = pytest.mark.alone

OLDER = "-3"  # of Prefect's migrations: the last three taken back
OLDER_STORE = "181f10493468"  # the revision of MLflow 1.2's stores


def run_once(zerotune: Zerotune) -> None:
    """Starts `zerotune up`, and stops it once it says its addresses."""
    running = zerotune.start("up", "--prefect-port", str(free_port()), "--mlflow-port", str(free_port()))
    running.wait_until(lambda: "Stop everything" in running.said, "its addresses", 200)
    running.process.send_signal(signal.SIGINT)
    ended = running.end(timeout=60)
    assert ended.returncode == 0, ended.stderr


def revision(database: Path) -> str:
    with sqlite3.connect(database) as connection:
        ((found,),) = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    return str(found)


def deployments(database: Path) -> set[str]:
    with sqlite3.connect(database) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM deployment")}


def make_older(prefect_database: Path, environment: dict[str, str]) -> None:
    """Leaves a Prefect database as a version before this one would have."""
    home = prefect_database.parent
    url = f"sqlite+aiosqlite:///{prefect_database}"
    subprocess.run(
        [BIN / "prefect", "server", "database", "downgrade", "-y", "-r", OLDER],
        env={**environment, "PREFECT_HOME": str(home), "PREFECT_SERVER_DATABASE_CONNECTION_URL": url},
        check=True,
    )
    (marker,) = home.glob("migrated-*")
    marker.rename(home / "migrated-3.8.0")


def older_store(database: Path) -> None:
    """Makes an MLflow store as MLflow 1.2 would have, with an experiment."""
    engine = schema.create_sqlalchemy_engine(f"sqlite:///{database}")
    InitialTables.metadata.create_all(engine)
    config = schema._get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, OLDER_STORE)
    engine.dispose()
    with sqlite3.connect(database) as connection:
        connection.execute(
            "INSERT INTO experiments (name, artifact_location, lifecycle_stage) VALUES ('kept', '/tmp/kept', 'active')"
        )


@pytest.mark.long
def test_a_module_of_prefect_s_name_where_the_command_runs_does_not_hinder_the_migration(tmp_path: Path) -> None:
    zerotune = Zerotune(tmp_path, tmp_path / "home")
    (tmp_path / "prefect.py").write_text("raise RuntimeError('of the user')\n")
    code = "from zerotune.flows.prefect_server import migrate_own_database; migrate_own_database()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=zerotune.environment, check=True)
    assert revision(zerotune.prefect_database)


@pytest.mark.long
def test_up_makes_the_databases_that_are_not_there_and_migrates_older_ones(tmp_path: Path) -> None:
    zerotune = Zerotune(tmp_path, tmp_path / "home")
    store = tmp_path / "mlflow.db"
    assert not zerotune.prefect_database.exists()
    assert not store.exists()
    run_once(zerotune)
    newest, newest_store = revision(zerotune.prefect_database), revision(store)
    assert deployments(zerotune.prefect_database) >= {"local", "nightly"}

    make_older(zerotune.prefect_database, zerotune.environment)
    assert revision(zerotune.prefect_database) != newest
    store.unlink()
    older_store(store)
    assert revision(store) == OLDER_STORE
    run_once(zerotune)
    assert revision(zerotune.prefect_database) == newest
    assert deployments(zerotune.prefect_database) >= {"local", "nightly"}
    assert revision(store) == newest_store
    assert MlflowClient(f"sqlite:///{store}").get_experiment_by_name("kept") is not None
