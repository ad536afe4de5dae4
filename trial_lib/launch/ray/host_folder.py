"""The folder of a study on a host of a Ray cluster. It exists while the study has an actor there."""

import fcntl
import shutil
from pathlib import Path

from trial_lib.slots.lock_dir import own_folder
from trial_lib.slots.lock_files import hold_folder, lock_file, release
from trial_lib.wire.whole_files import OWNERS_FOLDER


class HostFolder:
    """Makes a study's folder, and removes the folders of studies whose actors here were killed.

    Two nodes of a cluster may be on one machine. Their actors share the folder.

    Args:
        lock_dir: the folder of the locks. The studies' folders are in this user's folder there.
        study_id: the study's id.

    Attributes:
        path: the folder.
    """

    def __init__(self, lock_dir: Path, study_id: str) -> None:
        own = own_folder(lock_dir)
        self.path = own / "trials" / study_id
        self._locks = [hold_folder(lock_dir)]
        self.path.parent.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
        # One actor at a time does this, because a new lock file is not locked at once.
        starting = lock_file(own / "trials.lock", fcntl.LOCK_EX)
        try:
            for other in self.path.parent.iterdir():
                if other.is_dir() and other != self.path:
                    _remove_if_free(other)
            self.path.mkdir(exist_ok=True)
            self._locks.append(lock_file(_lock_of(self.path), fcntl.LOCK_SH))
        finally:
            release([starting])

    def remove(self) -> None:
        """Removes the folder. Called once, when the study has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        release(self._locks)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = lock_file(_lock_of(folder), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
    release([lock])


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
