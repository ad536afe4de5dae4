"""Where ranks build DeepSpeed's ops: in torch's own folder, or in ZeroTune's where that cannot be written."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from trial_lib.study.kept.data_folder import can_be_written, data_folder

NAMED = "TORCH_EXTENSIONS_DIR"

_DIGITS = 8


def build_root(environment: Mapping[str, str]) -> Path:
    """Returns the folder that torch builds extensions in."""
    named = environment.get(NAMED)
    # Path's own raises where there is no home.
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111
    return Path(named) if named else Path(home, ".cache", "torch_extensions")


def with_build_folder(environment: Mapping[str, str], interpreter: str) -> dict[str, str]:
    """Returns an environment of ranks that names a folder of ZeroTune's own where torch's cannot be written.

    One that the user names stays. So does torch's where ZeroTune's cannot be written either: what a program needs no op
    for runs all the same, and another one says what it could not do.

    Args:
        environment: of the ranks.
        interpreter: that they run with: another one's torch builds other ops.
    """
    if environment.get(NAMED) or can_be_written(build_root(environment)):
        return dict(environment)
    folder = data_folder() / "torch_extensions" / hashlib.sha256(interpreter.encode()).hexdigest()[:_DIGITS]
    # Where nobody knows of a home, ZeroTune has no folder either.
    is_possible = folder.is_absolute() and can_be_written(folder)
    return {**environment, NAMED: str(folder)} if is_possible else dict(environment)
