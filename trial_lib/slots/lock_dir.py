"""The folder of the locks of slots and ports, and each user's folder in it."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from trial_lib.wire.errors import InputError

USERS_FOLDER = "zerotune-"
"""Each user's folder begins with this. Its owner is the user, whatever follows."""
# Others find the claims in it by their names. They cannot list it, nor lock it.
_MODE = 0o711


def host_lock_dir() -> Path:
    """The folder that all users of this host share. It lasts for this boot, as slots and ports do.

    It is the system's own, so no user can close it to the others, or remove their files.
    """
    return Path("/tmp")


def own_folder(lock_dir: Path) -> Path:
    """Returns this user's folder, which nobody else may write to. It is made if it does not exist.

    If another user has laid something in its place, this user gets a folder of another name.

    Raises:
        InputError: it cannot be made.
    """
    try:
        lock_dir.mkdir(parents=True, exist_ok=True)
        name = f"{USERS_FOLDER}{os.getuid()}"
        usual = lock_dir / name
        with contextlib.suppress(FileExistsError):
            usual.mkdir(mode=_MODE)
        folder = usual if _is_own(usual) else next(filter(_is_own, sorted(lock_dir.glob(f"{name}.*"))), None)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=lock_dir))
        if stat.S_IMODE(folder.stat().st_mode) != _MODE:
            folder.chmod(_MODE)
    except OSError as error:
        raise InputError(
            f"the locks of slots and ports cannot be kept there ({error.strerror}).",
            where=str(lock_dir),
            remedy="Let every user of this host write to it (chmod 1777).",
        ) from None
    return folder


def _is_own(folder: Path) -> bool:
    there = folder.lstat()
    return stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()
