"""What somebody edits while a study runs: each trial starts from the files as they are then."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from trial_lib.experiment.files import write_whole
from trial_lib.experiment.study import StudyPaths
from trial_lib.experiment.yaml_file import Experiment
from trial_lib.study.fingerprint import Fingerprint, file_hash, fingerprint_in

_MOST_SAID = 8


class Edits:
    """Notices edits of the code and of the experiment's file, by a look at their sizes and times before each trial.

    Args:
        experiment: what was submitted.
        paths: the study's files.
        log: where an edit is told.
    """

    def __init__(self, experiment: Experiment, paths: StudyPaths, log: logging.Logger) -> None:
        self._paths = paths
        self._log = log
        self._begun = fingerprint_in(paths)
        self._files = {name: experiment.model_dir / name for name in self._begun.code}
        self._config = experiment.path if experiment.path not in (None, paths.experiment) else None
        if self._config is not None:
            self._files.setdefault(str(self._config), self._config)
        self._hashes = dict(self._begun.code)
        if self._config is not None:
            self._hashes[str(self._config)] = file_hash(self._config)
        self._seen = {name: _signature(path) for name, path in self._files.items()}
        self._lock = threading.Lock()
        self._told: dict[str, str] = {}

    @property
    def sentence(self) -> str:
        """What has been edited; empty where nothing has."""
        if not self._told:
            return ""
        names = list(self._told.values())
        more = f" and {len(names) - _MOST_SAID} more" if len(names) > _MOST_SAID else ""
        return f"Edited while the study ran: {', '.join(names[:_MOST_SAID])}{more}."

    def look(self) -> None:
        """Tells what has been edited since the last look. Callable from any thread."""
        with self._lock:
            now = {name: _signature(path) for name, path in self._files.items()}
            touched = [name for name, signature in now.items() if signature != self._seen[name]]
            self._seen = now
            edited = [name for name in touched if name not in self._told and self._is_edited(name)]
            for name in edited:
                self._told[name] = f"{name} (gone)" if now[name] is None else name
                self._tell(name)
            if any(name in self._begun.code for name in edited):
                self._mix()

    def _is_edited(self, name: str) -> bool:
        return file_hash(self._files[name]) != self._hashes[name]

    def _tell(self, name: str) -> None:
        if self._files[name] == self._config:
            self._log.warning(
                "%s was edited while the study runs: the study goes on with what it said at its start.", name
            )
        else:
            self._log.warning(
                "%s was edited while the study runs: the trials from before are compared with those from now on as if "
                "they were of the same training. A new study is surer.",
                self._told[name],
            )

    def _mix(self) -> None:
        """Has later studies learn nothing from this one."""
        mixed: Fingerprint = self._begun.model_copy(update={"is_mixed": True})
        write_whole(self._paths.fingerprint, mixed.model_dump_json(indent=2))


def _signature(path: Path) -> Mapping[str, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return {"size": found.st_size, "time": found.st_mtime_ns, "file": found.st_ino}
