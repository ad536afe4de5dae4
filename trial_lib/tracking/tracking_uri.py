"""The place of MLflow's runs, and the way to look at them."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import quote, unquote, urlencode, urlsplit

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import ARTIFACTS, STORE

_VARIABLE = "MLFLOW_TRACKING_URI"
_SQLITE = "sqlite:///"
# The same by the name of its driver. For the other spelling MLflow creates the parent folder without unquoting it.
_SQLITE_DRIVER = "sqlite+pysqlite:///"
_LOCAL_UI = "http://127.0.0.1:5000"  # `mlflow ui` answers there if no option says otherwise
# Without it MLflow opens its pages for traces of language models, until the user chooses the others.
_MODEL_TRAINING = "workflowType=machine_learning"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # those that MLflow writes to itself


def default_tracking_uri(work_dir: Path) -> str:
    """The tracking URI of MLflow's usual variable, or else that of a SQLite store in the work folder.

    A relative path is relative to the work folder, because the working directory of a worker's run is removed
    afterwards. Raises InputError if the variable names a file store, which MLflow no longer writes to.
    """
    uri = os.environ.get(_VARIABLE)
    if not uri:
        return _sqlite_uri(in_uri(work_dir.absolute() / STORE))
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
    """A path for the URI of a database, quoted."""
    return re.sub(r"[%?#]", lambda found: quote(found[0]), str(path))


def _sqlite_uri(path: str) -> str:
    return f"{_SQLITE_DRIVER if '%' in path else _SQLITE}{path}"


def sqlite_file(tracking_uri: str) -> Path | None:
    """The database file of a SQLite store; None for any other store."""
    for prefix in (_SQLITE, _SQLITE_DRIVER):
        if tracking_uri.startswith(prefix):
            path = tracking_uri.removeprefix(prefix).partition("?")[0]
            return Path(unquote(path)).absolute()
    return None


def artifact_location(tracking_uri: str, work_dir: Path) -> str | None:
    """The place of an experiment's artifacts; None if the server decides.

    For a SQLite store it is beside the database file. For any other database it is in the work folder. By default
    MLflow would use the working directory of the process that created the experiment.
    """
    if not is_database(tracking_uri):
        return None
    database = sqlite_file(tracking_uri)
    folder = work_dir.absolute() if database is None else database.parent
    return (folder / ARTIFACTS).as_uri()


def without_password(tracking_uri: str) -> str:
    shown = re.sub(r"([?&](?:ssl)?password=)[^&]*", r"\1***", tracking_uri)
    parts = urlsplit(shown)
    _, _, port = parts.netloc.rpartition(":")
    if is_server(shown) and (parts.password is not None or port.isdigit()):
        return shown.replace(f":{parts.password}@", ":***@")
    # Up to the last @, because a password may contain one, or an unescaped "/" or "#" at which the parser stops.
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", shown)


def is_database(tracking_uri: str) -> bool:
    """Whether the URI names a database, which MLflow writes to without a server."""
    return urlsplit(tracking_uri).scheme.partition("+")[0] in _DATABASES


def is_server(tracking_uri: str) -> bool:
    """Whether the URI names a tracking server, whose pages a browser can open."""
    return urlsplit(tracking_uri).scheme in ("http", "https")


def run_page(experiment_id: str, run_id: str) -> str:
    """The path of a run's page on an MLflow server."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{_MODEL_TRAINING}"


def trials_page(experiment_id: str, study_id: str) -> str:
    """The path of the page that shows a study's trials as a table, best first, with their measurements."""
    view = urlencode({"compareRunsMode": "TABLE", "viewStateShareKey": study_id})  # see `trials_view`
    return f"/#/experiments/{experiment_id}/runs?{_MODEL_TRAINING}&{view}"


def ways_to(tracking_uri: str, page: str | None) -> tuple[str, ...]:
    """The way to a page of MLflow (None: the first): the command to type, if any, and the page's address."""
    shown, path = without_password(tracking_uri), page or ""
    if is_database(tracking_uri):
        return f"{_mlflow()} ui --backend-store-uri {shlex.quote(shown)}", f"{_LOCAL_UI}{path}"
    return (f"{shown.rstrip('/')}{path}" if is_server(tracking_uri) else shown,)


def _mlflow() -> str:
    # ZeroTune may have an environment of its own. An MLflow of the user's might be of a version that refuses the store.
    own = Path(sys.executable).with_name("mlflow")
    found = shutil.which("mlflow")
    return shlex.quote(str(own)) if own.exists() and (found is None or not own.samefile(found)) else "mlflow"
