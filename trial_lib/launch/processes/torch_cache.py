"""The folder under /tmp that torch makes for compiled code, once that part of it is imported, compiled or not."""

import contextlib
import getpass
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path


def remove_empty_torch_cache(environment: Mapping[str, str]) -> None:
    """Removes the folder where nothing was compiled; whoever compiles later makes it again.

    What is in it stays: the full training finds there what the trials have compiled.

    Args:
        environment: of the ranks. A folder that it names is the user's own, and stays.

    Source:
        `torch/_inductor/runtime/cache_dir_utils.py`.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in environment:
        return
    temporary = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    # One that has something in it cannot be removed like this; a user whom the system has no name for has another.
    with contextlib.suppress(OSError, KeyError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        (temporary / f"torchinductor_{user}").rmdir()
