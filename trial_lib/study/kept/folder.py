"""What the folders of studies and of full experiments have in common, and what is checked before there is one."""

import contextlib
import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from trial_lib.experiment.read_experiment import Experiment
from trial_lib.experiment.yaml_document import read_yaml
from trial_lib.records.whereabouts import Whereabouts
from trial_lib.secrets.by_name import REDACTED, redact
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.study.kept.copies import is_copy
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import OWNERS_FILE, OWNERS_FOLDER, make_own_folder, open_own, write_whole

INTERRUPTED = "interrupted"
"""Why a study, or a full experiment, ended that somebody has interrupted."""

_LONG_LINE = 100_000  # a value that is broken into lines cannot be searched


class FinishedError(InputError):
    """There is nothing of a study, or of a full experiment, left to do."""


def begun_by(flow_run_id: str, records: Iterable[Path]) -> Path | None:
    """Returns the folder of what a Prefect flow run has begun, if it has: a retried flow run resumes that.

    Args:
        flow_run_id: the flow run.
        records: of studies or of full experiments.
    """
    for record in records:
        with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
            begun = json.loads(record.read_text())
            if begun.get("flow_run_id") == flow_run_id and not _is_copy(begun, record):
                return record.parent
    return None


def _is_copy(begun: dict[str, Any], record: Path) -> bool:
    if begun.get("whereabouts") is None:
        return False
    own_id = begun.get("study_id") or begun.get("experiment_id", "")
    return is_copy(Whereabouts.model_validate(begun["whereabouts"]), record, own_id, resumes=False)


def new_id(name: str) -> str:
    """Returns an id for a study or a full experiment of that name: unique, and fit for a folder's name."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "study"
    return f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def new_folder(path: Path, what: str, experiment: Experiment, whole: Path, shown: Path) -> None:
    """Makes a folder that keeps the experiment's YAML.

    Args:
        path: the folder, or one in it, made with all above it.
        what: `study`, say.
        experiment: what was submitted.
        whole: where in it the YAML goes as it is.
        shown: where it goes without the values that look like secrets.

    Raises:
        InputError: it cannot be written.
    """
    try:
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER)
        keep_experiment(experiment, whole, shown)
    except OSError as error:
        raise InputError(
            f"the {what}'s folder cannot be written ({error.strerror}).",
            where=str(whole.parent),
            remedy="Run zerotune in a folder that you may write to.",
        ) from None


def keep_experiment(experiment: Experiment, whole: Path, shown: Path) -> None:
    """Keeps the YAML as it is, for this user alone, and without its secrets, for everybody who sees the folder.

    Args:
        experiment: what was submitted.
        whole: where the YAML goes as it is; it may stand there already, and may be what was submitted.
        shown: where it goes without the values that look like secrets, and without comments, which may hold any.
    """
    text = experiment.text
    if not whole.exists() or whole.read_text(encoding="utf-8") != text:
        write_whole(whole, text, mode=0o600)
    written = read_yaml(whole).data
    shown_text = yaml.safe_dump(redact(written), sort_keys=False, allow_unicode=True, width=_LONG_LINE)
    # A secret may stand elsewhere, too: as a bare argument of the command, say.
    for value in KnownSecrets.within(written).values:
        shown_text = shown_text.replace(value, REDACTED)
    write_whole(shown, shown_text)


class _LogFile(logging.FileHandler):
    def _open(self) -> Any:
        return open_own(Path(self.baseFilename), self.mode, encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves out a line that the disk has no room for: the study itself says so."""


def file_logger(name: str, path: Path) -> logging.Logger:
    """Returns a logger that writes to a file; whoever shows it to people adds a handler."""
    logger = logging.Logger(name, logging.DEBUG)
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return logger


def remove_folder(root: Path, log: logging.Logger) -> None:
    """Removes a study's folder with its log, and the folder of all studies if it was the only one."""
    for handler in [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]:
        # It would open its file anew.
        log.removeHandler(handler)
        handler.close()
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def hold_lock(path: Path, what: str) -> FileLock:
    """Returns the lock of a folder's one driver, held.

    Args:
        path: the lock.
        what: `study`, say.

    Raises:
        InputError: another process has it.
    """
    lock = FileLock(path, mode=OWNERS_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another process drives this {what}.", where=str(path.parent), remedy="Wait for it, or stop it first."
        ) from None
    return lock
