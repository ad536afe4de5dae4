"""The folder that a study has on a host of a Ray cluster, as long as an actor of it lives there."""

import fcntl
import os
import shutil
from pathlib import Path

from trial_lib.launch.own_folder import own_folder


class HostFolder:
    """Makes a study's folder, and removes those of studies whose actors here were killed.

    Two nodes of a cluster may be one machine's: their actors share the folder.

    Args:
        lock_dir: the locks of slots and ports, the same for all studies on a host; the folders stand beside them.
        study_id: the study's.

    Attributes:
        path: the folder.
    """

    def __init__(self, lock_dir: Path, study_id: str) -> None:
        self.path = lock_dir / "trials" / study_id
        own_folder(lock_dir)
        self.path.parent.mkdir(exist_ok=True)
        # One at a time: a lock that has just been made is not held yet.
        with (lock_dir / "trials.lock").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            for other in self.path.parent.iterdir():
                if other.is_dir() and other != self.path:
                    _remove_if_free(other)
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(_lock_of(self.path), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Removes the folder; called once, when the study has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)
        os.close(self._lock)


def _remove_if_free(folder: Path) -> None:
    lock = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
        _lock_of(folder).unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
