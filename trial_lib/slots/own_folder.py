"""A folder under /tmp that belongs to one user alone, whoever made it first."""

import contextlib
import os
import stat
from pathlib import Path

from trial_lib.wire.errors import InputError


def own_folder(folder: Path) -> Path:
    """Returns a folder that only this user may write to, and makes it if it does not exist.

    Args:
        folder: below one that everybody may write to.

    Raises:
        InputError: there is something else, or another user's folder. Its owner could take or withhold the locks.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid():
        raise InputError(
            "it is not a folder of yours, and the locks of GPUs and ports in it would not be safe.",
            where=str(folder),
            remedy="Remove it, or have its owner do so.",
        )
    # An earlier process may have made it under a umask that lets the group write.
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return folder
