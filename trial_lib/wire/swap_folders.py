"""A trial's own folder on the user's NVMe device: what DeepSpeed swaps there is no other trial's, and goes with it.

A rank imports this module from the user's environment: standard library only.
"""

import contextlib
import hashlib
import shutil
from pathlib import Path

from trial_lib.wire.whole_files import open_own

_DIGITS = 16


def own_folder(nvme_path: Path, scratch: Path) -> Path:
    """Returns the folder of a trial below the one that the configuration names; a trial's own is returned as it is.

    Args:
        nvme_path: as the configuration names it.
        scratch: the trial's scratch folder, by which it is known.
    """
    name = _name(scratch)
    return nvme_path if nvme_path.name == name else nvme_path.absolute() / name


def note(scratch: Path, folder: Path) -> None:
    """Notes, in a rank, that DeepSpeed may swap into a folder of the trial's own.

    Args:
        scratch: the trial's scratch folder.
        folder: as `own_folder` returns it.
    """
    with contextlib.suppress(OSError), open_own(_notes(scratch), "a", encoding="utf-8") as file:
        file.write(f"{folder}\n")


def remove(scratch: Path) -> None:
    """Removes what a trial's ranks have swapped on this host, when none of them is left.

    Args:
        scratch: the trial's scratch folder.
    """
    with contextlib.suppress(OSError):
        for folder in set(_notes(scratch).read_text(encoding="utf-8").splitlines()):
            # The program may write into its scratch folder what it likes.
            if Path(folder).name == _name(scratch):
                shutil.rmtree(folder, ignore_errors=True)


def _name(scratch: Path) -> str:
    return f"zerotune-{hashlib.sha256(str(scratch).encode()).hexdigest()[:_DIGITS]}"


def _notes(scratch: Path) -> Path:
    return scratch / "swap_folders"
