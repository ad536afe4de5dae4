"""The common part of the folders of studies and full experiments, and the checks before there is one."""

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

from filelock import FileLock, Timeout

from trial_lib.experiment.read_experiment import Experiment
from trial_lib.records.whereabouts import Whereabouts
from trial_lib.study.kept.copies import is_copy
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import OWNERS_FILE, OWNERS_FOLDER, make_own_folder, open_own, write_whole

INTERRUPTED = "interrupted"
"""The reason of an interrupted study or full experiment."""

_LONG_LINE = 100_000  # A value that is broken into lines cannot be searched.


class FinishedError(InputError):
    """Nothing of a study, or of a full experiment, is left to do."""


def begun_by(flow_run_id: str, records: Iterable[Path]) -> Path | None:
    """Returns the folder that a Prefect flow run has begun, if any. A retried flow run resumes it.

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


# The name of a folder may have 255 bytes, and files and runs are named after it.
_LONGEST_NAME = 100


def new_id(name: str) -> str:
    """Returns a unique id for a study or full experiment of that name. It is a valid name of a folder."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "study"
    return f"{plain[:_LONGEST_NAME]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def new_folder(path: Path, what: str, experiment: Experiment, whole: Path) -> None:
    """Makes a folder that keeps the experiment's YAML.

    Args:
        path: the folder, or one in it. Folders above it are made as well.
        what: such as `study`, for messages.
        experiment: what was submitted.
        whole: the file for the YAML.

    Raises:
        InputError: it cannot be written.
    """
    try:
        make_own_folder(path.parent)
        path.mkdir(mode=OWNERS_FOLDER)
        keep_experiment(experiment, whole)
    except OSError as error:
        raise InputError(
            f"the {what}'s folder cannot be written ({error.strerror}).",
            where=str(whole.parent),
            remedy="Run zerotune in a folder that you may write to.",
        ) from None


def keep_experiment(experiment: Experiment, whole: Path) -> None:
    """Keeps the YAML, for this user alone, in a file that may exist and may be the submitted one."""
    if not whole.exists() or whole.read_text(encoding="utf-8") != experiment.text:
        write_whole(whole, experiment.text, mode=0o600)


class _LogFile(logging.FileHandler):
    def _open(self) -> Any:
        return open_own(Path(self.baseFilename), self.mode, encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Leaves out a line that the disk has no room for. The study itself reports the full disk."""


def file_logger(name: str, path: Path) -> logging.Logger:
    """Returns a logger that writes to a file. A command adds a handler to show it."""
    logger = logging.Logger(name, logging.DEBUG)
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(file)
    return logger


def remove_folder(root: Path, log: logging.Logger) -> None:
    """Removes a study's folder with its log, and the folder of all studies if no other study is in it."""
    for handler in [handler for handler in log.handlers if isinstance(handler, logging.FileHandler)]:
        # Otherwise it would open its file again.
        log.removeHandler(handler)
        handler.close()
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def hold_lock(path: Path, what: str) -> FileLock:
    """Returns the lock of a folder's one driver, held.

    Args:
        path: the lock's file.
        what: such as `study`, for messages.

    Raises:
        InputError: another process holds it.
    """
    lock = FileLock(path, mode=OWNERS_FILE, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"another process drives this {what}.", where=str(path.parent), remedy="Wait for it, or stop it first."
        ) from None
    return lock
