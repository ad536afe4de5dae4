"""Edits of the user's files while a study runs. Each trial starts from the files as they are at that time."""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from trial_lib.inputs.read_experiment import Experiment
from trial_lib.messages.files import write_whole
from trial_lib.records.folders import StudyPaths
from trial_lib.study.fingerprint import Fingerprint, code_file, file_hash, fingerprint_in

_MOST_SAID = 8


class Edits:
    """Notices edits of the code and of the experiment's file. It looks at sizes and times before each trial.

    Args:
        experiment: what was submitted.
        include: files and folders that the code imports from outside the model directory.
        paths: the study's files.
        log: the study's log, which gets each edit.
    """

    def __init__(self, experiment: Experiment, include: Sequence[Path], paths: StudyPaths, log: logging.Logger) -> None:
        self._paths = paths
        self._log = log
        self._begun = fingerprint_in(paths)
        self._config = experiment.path if experiment.path not in (None, paths.experiment) else None
        named = {name: code_file(name, experiment.model_dir, include) for name in self._begun.code}
        self._files = {name: path for name, path in named.items() if not _is_same(path, self._config)}
        self._hashes = dict(self._begun.code)
        # A file without a fingerprint counts from the study's opening.
        for path in filter(None, (self._config, _config_elsewhere(experiment))):
            self._files[str(path)] = path
            self._hashes[str(path)] = file_hash(path)
        self._seen = {name: _signature(path) for name, path in self._files.items()}
        self._lock = threading.Lock()
        self._told: dict[str, str] = {}

    @property
    def sentence(self) -> str:
        """The edited files, in a sentence; empty if there are none."""
        if not self._told:
            return ""
        names = list(self._told.values())
        more = f" and {len(names) - _MOST_SAID} more" if len(names) > _MOST_SAID else ""
        return f"Edited while the study ran: {', '.join(names[:_MOST_SAID])}{more}."

    def so_far(self) -> str:
        """Looks once more, and returns the sentence. The study has failed, perhaps because it cannot be written."""
        with contextlib.suppress(OSError):
            self.look()
        return self.sentence

    def look(self) -> None:
        """Logs the edits since the last look. It may be called from any thread."""
        with self._lock:
            now = {name: _signature(path) for name, path in self._files.items()}
            touched = [name for name, signature in now.items() if signature != self._seen[name]]
            self._seen = now
            edited = [name for name in touched if name not in self._told and self._is_edited(name)]
            for name in edited:
                self._told[name] = f"{name} (gone)" if now[name] is None else name
                self._tell(name)
            if any(self._files[name] != self._config for name in edited):
                self._mix()

    def _is_edited(self, name: str) -> bool:
        return file_hash(self._files[name]) != self._hashes[name]

    def _tell(self, name: str) -> None:
        if self._files[name] == self._config:
            self._log.warning(
                "%s was edited while the study runs. The study continues with the file as it was at its start.", name
            )
        else:
            self._log.warning(
                "%s was edited while the study runs. Earlier trials were measured before the edit, so results may not "
                "be comparable. Start a new study to be safe.",
                self._told[name],
            )

    def _mix(self) -> None:
        # Marks the study's fingerprint, so that later studies learn nothing from it.
        mixed: Fingerprint = self._begun.model_copy(update={"is_mixed": True})
        write_whole(self._paths.fingerprint, mixed.model_dump_json(indent=2))


def _is_same(path: Path, other: Path | None) -> bool:
    return other is not None and path.name == other.name and path.resolve() == other.resolve()


def _config_elsewhere(experiment: Experiment) -> Path | None:
    # The file of the DeepSpeed configuration if it is outside the code. A fingerprint has the code.
    source = experiment.config_source
    is_elsewhere = source.is_file() and not source.resolve().is_relative_to(experiment.model_dir)
    return None if not is_elsewhere or _is_same(source, experiment.path) else source


def _signature(path: Path) -> Mapping[str, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return {"size": found.st_size, "time": found.st_mtime_ns, "file": found.st_ino}
