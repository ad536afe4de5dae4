"""Where MLflow keeps the runs, and how to look at them."""

import functools
import os
import re
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import quote, unquote, urlencode, urlsplit

from trial_lib.wire.errors import InputError

_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
# The same by the name of its driver. Of the other MLflow makes the parent folder as it is spelled, quoted or not.
_SQLITE_DRIVER = "sqlite+pysqlite:///"
_LOCAL_UI = "http://127.0.0.1:5000"  # `mlflow ui` answers there if no option says otherwise
# Without it MLflow opens its pages for traces of language models, until a person has once chosen the others.
_MODEL_TRAINING = "workflowType=machine_learning"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # those that MLflow writes to itself


def default_tracking_uri(work_dir: Path) -> str:
    """Returns the tracking URI that MLflow's usual variable names, else that of a SQLite store in the work folder.

    A relative path is one from the work folder: the working directory of a worker's run is gone after it.

    Args:
        work_dir: the folder that studies and the store stand in.

    Raises:
        InputError: the variable names a file store, which MLflow no longer writes to.
    """
    uri = os.environ.get(_VARIABLE)
    if not uri:
        return _sqlite_uri(in_uri(work_dir.absolute() / "mlflow.db"))
    if urlsplit(uri).scheme in ("", "file") and uri != "databricks":
        raise InputError(
            f"{uri} is a file store, and MLflow no longer writes to those.",
            where=_VARIABLE,
            remedy="Name a server (http://...) or a database (sqlite:////absolute/path/mlflow.db), or unset it.",
        )
    if uri.startswith(_SQLITE):
        file, *options = uri.removeprefix(_SQLITE).split("?", 1)
        whole = file if file.startswith("/") else f"{in_uri(work_dir.absolute())}/{file}"
        return "?".join([_sqlite_uri(whole), *options])
    return uri


def in_uri(path: Path) -> str:
    """Returns a path as the URI of a database has it: what would end it there, or mean something else, is quoted."""
    return re.sub(r"[%?#]" if _is_unquoted() else r"[?]", lambda found: quote(found[0]), str(path))


@functools.cache
def _is_unquoted() -> bool:
    """Returns whether SQLAlchemy reads the path of a database as quoted: since 2.1, which wants Python 3.11."""
    try:
        return tuple(map(int, version("sqlalchemy").split(".")[:2])) >= (2, 1)
    except PackageNotFoundError:
        # Nobody opens a database.
        return True


def _sqlite_uri(path: str) -> str:
    return f"{_SQLITE_DRIVER if '%' in path else _SQLITE}{path}"


def sqlite_file(tracking_uri: str) -> Path | None:
    """Returns the database file of a SQLite store; None for any other store."""
    for prefix in (_SQLITE, _SQLITE_DRIVER):
        if tracking_uri.startswith(prefix):
            path = tracking_uri.removeprefix(prefix).partition("?")[0]
            return Path(unquote(path) if _is_unquoted() else path).absolute()
    return None


def artifact_location(tracking_uri: str, work_dir: Path) -> str | None:
    """Returns where an experiment's artifacts go; None where the server decides.

    That is beside a SQLite store, and of any other database in the work folder. Left to itself MLflow puts them in the
    working directory of whoever created the experiment.
    """
    if not is_database(tracking_uri):
        return None
    database = sqlite_file(tracking_uri)
    folder = work_dir.absolute() if database is None else database.parent
    return (folder / "mlartifacts").as_uri()


def without_password(tracking_uri: str) -> str:
    """Returns the URI as it may be shown."""
    shown = re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", tracking_uri)
    parts = urlsplit(shown)
    _, _, port = parts.netloc.rpartition(":")
    if is_server(shown) and (parts.password is not None or port.isdigit()):
        return shown.replace(f":{parts.password}@", ":***@")
    # To the last @: a password may hold one, or a "/" or "#" that is not escaped, at which the parser stops.
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", shown)


def is_database(tracking_uri: str) -> bool:
    """Returns whether the URI is that of a database, which MLflow writes to without a server."""
    return urlsplit(tracking_uri).scheme.partition("+")[0] in _DATABASES


def is_server(tracking_uri: str) -> bool:
    """Returns whether the URI is that of a tracking server, whose pages a browser can open."""
    return urlsplit(tracking_uri).scheme in ("http", "https")


def run_page(experiment_id: str, run_id: str) -> str:
    """Returns the path of a run's page on an MLflow server."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{_MODEL_TRAINING}"


def trials_page(experiment_id: str, view_key: str) -> str:
    """Returns the path of the page that shows a study's trials as a table, best first, with what they measured.

    Args:
        experiment_id: MLflow's.
        view_key: of the study's view (see `trials_view`).
    """
    view = urlencode({"compareRunsMode": "TABLE", "viewStateShareKey": view_key})
    return f"/#/experiments/{experiment_id}/runs?{_MODEL_TRAINING}&{view}"


def ways_to(tracking_uri: str, page: str | None) -> tuple[str, ...]:
    """Returns how a person gets to a page of MLflow's: what to type, where that is necessary, and the page's address.

    Args:
        tracking_uri: MLflow's store or server.
        page: its path; None for the first page.
    """
    shown, path = without_password(tracking_uri), page or ""
    if is_database(tracking_uri):
        return f"mlflow ui --backend-store-uri {shlex.quote(shown)}", f"{_LOCAL_UI}{path}"
    return (f"{shown.rstrip('/')}{path}" if is_server(tracking_uri) else shown,)
