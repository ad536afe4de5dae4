"""A PostgreSQL for tests: the one that runs where PGHOST names it, else one of Debian's packages, started here."""

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from server_fixtures import free_port

_PACKAGES = Path("/usr/lib/postgresql")
_READY_S = 60


@dataclass(frozen=True)
class PostgreSQL:
    """A server whose user may create databases.

    Attributes:
        address: `user[:password]@host:port`.
        prefix: what the names of this test's databases begin with: the server may be a team's, with others.
    """

    address: str
    prefix: str = field(default_factory=lambda: f"zerotune_test_{secrets.token_hex(4)}_")

    def new_database(self, name: str) -> str:
        """Creates an empty database of the test's, and returns its address without a scheme."""
        self._administer(f'create database "{self.prefix}{name}"')
        return f"//{self.address}/{self.prefix}{name}"

    def drop_databases(self) -> None:
        """Drops the databases of the test, whoever is still connected to them."""
        with contextlib.closing(self.connect("postgres")) as connection, connection.cursor() as cursor:
            cursor.execute("select datname from pg_database where starts_with(datname, %s)", (self.prefix,))
            names = [name for (name,) in cursor.fetchall()]
        for name in names:
            self._administer(f'drop database "{name}" with (force)')

    def connect(self, database: str) -> Any:
        """Returns a connection to a database, by its whole name."""
        import psycopg2

        return psycopg2.connect(f"postgresql://{self.address}/{database}")

    def query(self, name: str, sql: str) -> list[tuple[Any, ...]]:
        """Returns the rows of a query of a database of the test's."""
        with contextlib.closing(self.connect(f"{self.prefix}{name}")) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    def _administer(self, sql: str) -> None:
        connection = self.connect("postgres")
        connection.autocommit = True
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute(sql)


@contextlib.contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    """Yields a PostgreSQL; skips the test with the reason where there can be none.

    One that PGHOST names was asked for: where it does not answer, the test fails.
    """
    if "PGHOST" in os.environ:
        user, password = os.environ.get("PGUSER", "postgres"), os.environ.get("PGPASSWORD")
        login = user if password is None else f"{user}:{password}"
        named = PostgreSQL(f"{login}@{os.environ['PGHOST']}:{os.environ.get('PGPORT', '5432')}")
        _check_that_it_answers(named)
        try:
            yield named
        finally:
            named.drop_databases()
        return
    # A package with the client alone has a folder there too.
    programs = sorted(_PACKAGES.glob("*/bin/initdb"), key=lambda path: int(path.parents[1].name))
    if not programs:
        pytest.skip("no PostgreSQL: PGHOST names none, and Debian's package postgresql (the server) is not installed")
    # Not pytest's folder, which is closed to other users, and PostgreSQL refuses to run as root.
    folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
    try:
        with _started(programs[-1].parent, folder, _user(folder)) as server:
            yield server
    finally:
        shutil.rmtree(folder)


def _check_that_it_answers(server: PostgreSQL) -> None:
    import psycopg2

    try:
        server.connect("postgres").close()
    except psycopg2.OperationalError as error:
        pytest.fail(f"The PostgreSQL that PGHOST names does not answer; unset PGHOST, or mend it: {str(error).strip()}")


def _user(folder: Path) -> dict[str, Any]:
    """Returns whose its processes are: its own user's, to whom the folder is given, where this is root."""
    if os.getuid() != 0:
        return {}
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL refuses to run as root, and there is no user `postgres` for it")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def _started(binaries: Path, folder: Path, user: dict[str, Any]) -> Iterator[PostgreSQL]:
    data, port = folder / "data", free_port()
    initdb = [binaries / "initdb", "-D", data, "-U", "zerotune", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run([str(word) for word in initdb], cwd=folder, check=True, capture_output=True, **user)
    settings = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": str(folder),
        "fsync": "off",
        "max_connections": "100",
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    process = subprocess.Popen(
        [str(binaries / "postgres"), "-D", str(data), "-p", str(port), *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **user,
    )
    try:
        server = PostgreSQL(f"zerotune@127.0.0.1:{port}")
        _wait_until_ready(server, process)
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(server: PostgreSQL, process: subprocess.Popen[bytes]) -> None:
    import psycopg2

    deadline = time.monotonic() + _READY_S
    while True:
        try:
            server.connect("postgres").close()
            return
        except psycopg2.OperationalError:
            assert process.poll() is None, "PostgreSQL has ended"
            assert time.monotonic() < deadline, "PostgreSQL does not answer"
            time.sleep(0.1)
