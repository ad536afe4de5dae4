"""The folder where ranks build DeepSpeed's operators: torch's own, or ZeroTune's if torch's cannot be written."""

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
    # Path.home() raises if there is no home folder.
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111
    return Path(named) if named else Path(home, ".cache", "torch_extensions")


def with_build_folder(environment: Mapping[str, str], interpreter: str) -> dict[str, str]:
    """Returns the environment of ranks, with ZeroTune's folder for builds if torch's cannot be written.

    A folder that the user names stays. If ZeroTune's folder cannot be written either, torch's stays. A program that
    needs no operator still runs, and another one reports what it could not do.

    Args:
        environment: of the ranks.
        interpreter: of the ranks. The torch of another one builds other operators.
    """
    if environment.get(NAMED) or can_be_written(build_root(environment)):
        return dict(environment)
    folder = data_folder() / "torch_extensions" / hashlib.sha256(interpreter.encode()).hexdigest()[:_DIGITS]
    # Without a home folder ZeroTune has no folder either.
    is_possible = folder.is_absolute() and can_be_written(folder)
    return {**environment, NAMED: str(folder)} if is_possible else dict(environment)
