"""The place of a folder, by which a copy of a study's folder is recognised."""

import platform
from pathlib import Path

from trial_lib.records.frozen_record import FrozenRecord


class Whereabouts(FrozenRecord):
    """The place of a folder.

    Attributes:
        host: the host's name.
        path: of the folder, without links.
        inode: the folder's number on its file system. A folder that is moved there keeps it; a copy gets another.
    """

    host: str
    path: str
    inode: int


def whereabouts_of(root: Path) -> Whereabouts:
    """Returns the present place of a folder."""
    folder = root.resolve()
    return Whereabouts(host=platform.node(), path=str(folder), inode=folder.stat().st_ino)
