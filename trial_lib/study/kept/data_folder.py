"""ZeroTune's own folder: Prefect's database, the files of `zerotune up`, and operators without another place."""

import os
import tempfile
from pathlib import Path

import platformdirs

from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import OWNERS_FOLDER, make_own_folder

_REMEDY = "Mend its permissions, or name another one by XDG_DATA_HOME."


def data_folder() -> Path:
    """Returns the folder, which may not exist yet. Its path is relative if there is no home folder."""
    try:
        return platformdirs.user_data_path("zerotune")
    except RuntimeError:
        return Path("~/.local/share/zerotune")


def require_data_folder(name: str) -> None:
    """Checks that a folder in it can be made and written. It leaves nothing.

    Args:
        name: of the folder.

    Raises:
        InputError: it cannot.
    """
    folder = _in_data_folder(name)
    if not can_be_written(folder):
        nearest = _nearest(folder)
        why = "." if nearest.is_dir() else " (it is no folder)."
        raise InputError(f"it cannot be written{why}", where=str(nearest), remedy=_REMEDY)
    nearest = _nearest(folder)
    try:
        # Permissions do not show all. A kernel's own folder, or a host's that trusts no root, refuses what they allow.
        Path(tempfile.mkdtemp(dir=nearest, prefix=".zerotune-")).rmdir()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(nearest), remedy=_REMEDY) from None


def can_be_written(folder: Path) -> bool:
    """Returns whether a folder can be written, or made."""
    nearest = _nearest(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(folder: Path) -> Path:
    """Returns the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def _in_data_folder(name: str) -> Path:
    folder = data_folder() / name
    if not folder.is_absolute():
        raise InputError(
            "there is no home folder: the variable is not set, and this user is not in the password database.",
            where="HOME",
            remedy="Set it, or XDG_DATA_HOME, to a folder that you may write to.",
        )
    return folder


def made_in_data_folder(name: str) -> Path:
    """Returns a folder in it, which only its owner may enter, and makes it if it does not exist.

    Args:
        name: of the folder.

    Raises:
        InputError: it cannot be made or written.
    """
    folder = _in_data_folder(name)
    try:
        make_own_folder(folder)
        # Earlier versions made it readable for all users. A lock that another user can open can be held by them.
        folder.chmod(OWNERS_FOLDER)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"it cannot be written ({error.strerror}).", where=str(folder), remedy=_REMEDY) from None
    return folder
