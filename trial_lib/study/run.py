"""A study or a full experiment that runs in this process: its folder with record, lock, log and tracker."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from filelock import FileLock

from zerotune.trial_lib.records.folders import DrivenFolder, RunRecord, StudyRecord, StudyStatus, whereabouts_of
from zerotune.trial_lib.study.folder import INTERRUPTED, FolderError, file_logger, hold_lock, with_own_id, write_record
from zerotune.trial_lib.tracking.sync import FullExperimentSync, StudySync, Tracker

_TRACKING_CLOSE_S = 30.0
_TRACKING_SHORT_S = 5.0  # after an interrupt, or if MLflow did not answer

RecordT = TypeVar("RecordT", bound=RunRecord)
FolderT = TypeVar("FolderT", bound=DrivenFolder)


@dataclass(frozen=True)
class HeldFolder(Generic[RecordT]):
    """A folder that this process drives."""

    record: RecordT
    lock: FileLock
    log: logging.Logger
    tracker: Tracker
    copied: str  # that the folder is a copy, which has an id of its own. Empty if it is none.


def hold_folder(
    paths: DrivenFolder, record: RecordT, tracking_uri: str, may_be_copy: bool = True
) -> HeldFolder[RecordT]:
    """Locks a folder, and writes its record, by which it can be resumed. Raises InputError if it is locked already."""
    lock = hold_lock(paths.lock, record.kind)
    record, copied = with_own_id(record, paths.record, resumes=True) if may_be_copy else (record, "")
    record = record.model_copy(update={"whereabouts": whereabouts_of(paths.root)})
    write_record(paths, record)
    sync: type[Any] = StudySync if isinstance(record, StudyRecord) else FullExperimentSync
    tracker = Tracker(lambda: sync(paths, tracking_uri), tracking_uri)
    return HeldFolder(record, lock, file_logger(record.id, paths.log), tracker, copied)


class OpenRun(Generic[RecordT, FolderT]):
    """A study or a full experiment that runs in this process."""

    def __init__(self, held: HeldFolder[RecordT], paths: FolderT) -> None:
        self.record = held.record  # as it is on the disk
        self.paths = paths
        self.log = held.log
        self.tracker = held.tracker
        self.is_down = False  # nothing is left to do; closing waits a while for the tracking server
        self._lock = held.lock
        self._writing = threading.RLock()
        self._interrupted = False
        self._closed = False

    def begin(self) -> None:
        """Raises KeyboardInterrupt if it was interrupted before."""
        with self._writing:
            if self._interrupted:
                raise KeyboardInterrupt
            self._update(status=StudyStatus.RUNNING, reason="", ended_at=None)
        self.tracker.start()

    def interrupt(self) -> None:
        """Writes that it is interrupted, if it has not ended.

        It returns at once and may be called from any thread. The record is on the disk before anything can end this
        process.
        """
        with self._writing:
            self._interrupted = True
            if self.record.status is StudyStatus.RUNNING:
                with contextlib.suppress(FolderError):
                    self._update(status=StudyStatus.CANCELLED, reason=INTERRUPTED, ended_at=time.time())

    def _update(self, **changes: object) -> None:
        with self._writing:
            self.record = self.record.model_copy(update=changes)
            write_record(self.paths, self.record)
        self.tracker.notify()

    def _close_tracker(self) -> bool:
        # Waits a while for the tracking server. Returns whether that has everything.
        is_hopeless = self.record.status is StudyStatus.CANCELLED or self.tracker.last_error is not None
        return self.tracker.close(_TRACKING_SHORT_S if is_hopeless else _TRACKING_CLOSE_S, self.log.info)
