"""Checks MLflow: whether its store or server answers, and its version."""

import errno
import http.client
import os
import sqlite3
import ssl
import tempfile
import urllib.error
import urllib.request
from base64 import b64encode
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trial_lib.doctor.check import Check, fail, ok, warn
from trial_lib.doctor.tls import trusting
from trial_lib.tracking.tracking_uri import default_tracking_uri, is_database, is_server, sqlite_file, without_password
from trial_lib.wire.errors import InputError

NAME = "MLflow"
_TIMEOUT_S = 5
# MLflow's own variables, and those of its HTTP library.
_BUNDLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_LATER = "or unset MLFLOW_TRACKING_URI to keep the runs in ./mlflow.db; `zerotune sync STUDY` sends them later."


def check_mlflow(work_dir: Path) -> Check:
    """Checks the MLflow store of a study in a folder."""
    try:
        uri = default_tracking_uri(work_dir)
    except InputError as error:
        return fail(NAME, error.what, error.remedy)
    shown, ours = without_password(uri), version("mlflow")
    if is_server(uri):
        return _check_server(uri, shown, ours)
    if not is_database(uri):
        return warn(NAME, f"{shown} was not checked, MLflow {ours} here", f"See that it answers, {_LATER}")
    database = sqlite_file(uri)
    if database is not None:
        return _check_file(database, shown, ours)
    try:
        _connect(uri)
    except Exception as error:  # noqa: BLE001 - drivers have errors of their own
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].replace(uri, shown)
        return fail(NAME, f"{shown} does not answer ({first})", f"Start it, install its driver, {_LATER}")
    return ok(NAME, f"{shown} answers, MLflow {ours}")


def _check_file(database: Path, shown: str, ours: str) -> Check:
    try:
        if database.exists():
            with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
        # A study creates the store, and the folders above it.
        folder = next(place for place in database.parents if place.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
        if database.exists() and not os.access(database, os.W_OK):
            raise PermissionError(errno.EACCES, "it may not be written")
    except (OSError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return fail(NAME, f"{shown} cannot be used ({why})", f"Move that file, name another store, {_LATER}")
    return ok(NAME, f"{shown}, MLflow {ours}")


def _check_server(uri: str, shown: str, ours: str) -> Check:
    # urllib would read a password in the address as its port, and show it in the exception.
    parts = urlsplit(uri)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    try:
        request = urllib.request.Request(f"{bare}/version", headers=_authorization(parts.username, parts.password))
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_tls()) as answer:
            theirs = answer.read(100).decode().strip()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return fail(
                NAME,
                f"{shown} refuses this user ({error.code})",
                "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN. If you reach the "
                "server by a name, MLFLOW_SERVER_ALLOWED_HOSTS must have that name.",
            )
        return warn(NAME, f"{shown} answers, but does not show its version ({error.code})", "See that it is an MLflow.")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return fail(NAME, f"{shown} does not answer ({error})", f"Start it, {_LATER}")
    if theirs.split(".")[0] != ours.split(".")[0]:
        return warn(NAME, f"{shown} is MLflow {theirs}, this is {ours}", "Bring both to the same major version.")
    return ok(NAME, f"{shown} answers, MLflow {theirs} there, {ours} here")


def _tls() -> ssl.SSLContext:
    """Returns the certificates that MLflow's own client would trust, and the one that it would present."""
    anybody = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    context = trusting(next(filter(None, map(os.environ.get, _BUNDLES)), None), anybody=anybody)
    own = os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    if own:
        context.load_cert_chain(own)
    return context


def _authorization(user: str | None, password: str | None) -> dict[str, str]:
    """Returns the header that MLflow's own client would send, from the address or else from the environment."""
    if user:
        return _basic(unquote(user), unquote(password or ""))
    token, user = os.environ.get("MLFLOW_TRACKING_TOKEN"), os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"Authorization": f"Bearer {token}"}
    if user:
        return _basic(user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
    return {}


def _basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


def _connect(uri: str) -> None:
    """Opens a connection to a database, and closes it.

    Raises:
        Exception: whatever the database's driver raises, or an ImportError if it is missing.
    """
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, connect_args={"connect_timeout": _TIMEOUT_S})
    try:
        engine.connect().close()
    finally:
        engine.dispose()
