"""A trial's own folder on the user's NVMe device. DeepSpeed swaps into it, and it is removed with the trial.

A rank imports this module, so it needs only the standard library.
"""

import contextlib
import hashlib
import json
import shutil
from pathlib import Path

from trial_lib.wire.layer import read_layer
from trial_lib.wire.whole_files import open_own

_DIGITS = 16


def own_folder(nvme_path: Path, scratch: Path) -> Path:
    """Returns a trial's own folder below the configuration's path.

    A path that is the trial's own already is returned unchanged.

    Args:
        nvme_path: as the configuration has it.
        scratch: the trial's scratch folder, which identifies the trial.
    """
    name = _name(scratch)
    return nvme_path if nvme_path.name == name else nvme_path.absolute() / name


def note(scratch: Path, folder: Path) -> None:
    """Records, in a rank, that DeepSpeed may swap into a folder of the trial's own.

    Args:
        scratch: the trial's scratch folder.
        folder: as `own_folder` returns it.
    """
    with contextlib.suppress(OSError), open_own(_notes(scratch), "a", encoding="utf-8") as file:
        file.write(f"{folder}\n")


def remove(scratch: Path) -> None:
    """Removes the files that a trial's ranks have swapped on this host. Call it when no rank is left.

    Args:
        scratch: the trial's scratch folder.
    """
    with contextlib.suppress(OSError):
        for folder in set(_notes(scratch).read_text(encoding="utf-8").splitlines()):
            # The program may write anything into its scratch folder, so the name is checked.
            if Path(folder).name == _name(scratch):
                shutil.rmtree(folder, ignore_errors=True)


def _name(scratch: Path) -> str:
    layer, path = read_layer(scratch), str(scratch)
    if layer is not None:
        # The trial's processes know the folder by another path than the driver.
        path = json.loads(layer.as_recorded(json.dumps(path)))
    return f"zerotune-{hashlib.sha256(path.encode()).hexdigest()[:_DIGITS]}"


def _notes(scratch: Path) -> Path:
    return scratch / "swap_folders"
