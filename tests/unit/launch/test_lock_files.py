"""Locks in a folder whose files somebody removes, as cleaners of /tmp do."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.locks import hold_folder, lock_file, own_folder, release


def lock_while_it_is_removed(path: Path, lock: Callable[[], int], flags: int, remove: Callable[[], None]) -> int:
    """Returns the lock of who waited for it while what stands at the path was held, and then removed."""
    holder, got = os.open(path, flags), []
    fcntl.flock(holder, fcntl.LOCK_EX)
    taker = threading.Thread(target=lambda: got.append(lock()))
    taker.start()
    time.sleep(0.2)
    assert not got
    remove()
    os.close(holder)
    taker.join(timeout=10)
    return got[0]


def test_who_opened_a_file_before_it_was_removed_takes_the_one_that_stands_there_after(tmp_path: Path) -> None:
    path = tmp_path / "slot.lock"
    path.touch()
    taken = lock_while_it_is_removed(path, lambda: lock_file(path, fcntl.LOCK_EX), os.O_RDWR, path.unlink)
    assert os.path.samestat(os.fstat(taken), path.stat())
    with pytest.raises(BlockingIOError):
        lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    release([taken])


def test_who_opened_the_folder_before_it_was_removed_makes_it_again(tmp_path: Path) -> None:
    folder = own_folder(tmp_path)
    held = lock_while_it_is_removed(folder, lambda: hold_folder(tmp_path), os.O_RDONLY, folder.rmdir)
    assert os.path.samestat(os.fstat(held), folder.stat())
    release([held])


def test_a_file_is_young_when_it_is_taken_however_old_it_was(tmp_path: Path) -> None:
    path = tmp_path / "slot.lock"
    path.touch()
    os.utime(path, (0, 0))
    release([lock_file(path, fcntl.LOCK_EX)])
    assert time.time() - path.stat().st_mtime < 60
    assert time.time() - path.stat().st_atime < 60
