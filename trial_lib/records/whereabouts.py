"""Where a folder stands: by that a study's folder is told from a copy of it."""

import platform
from pathlib import Path

from trial_lib.records.frozen_record import FrozenRecord


class Whereabouts(FrozenRecord):
    """Where a folder stands.

    Attributes:
        host: the host's name.
        path: of the folder, without links.
        inode: the folder's number on its file system, which it keeps when it is moved there, and no copy has.
    """

    host: str
    path: str
    inode: int


def whereabouts_of(root: Path) -> Whereabouts:
    """Returns where a folder stands now."""
    folder = root.resolve()
    return Whereabouts(host=platform.node(), path=str(folder), inode=folder.stat().st_ino)
