"""The folder under /tmp that torch makes for compiled code, even if nothing is compiled."""

import contextlib
import getpass
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path


def remove_empty_torch_cache(environment: Mapping[str, str]) -> None:
    """Removes the folder if it is empty. torch makes it again if it compiles later.

    Compiled code stays, because the full training uses what the trials have compiled.

    Args:
        environment: the environment variables of the ranks. A folder that they name is the user's, and stays.

    Source:
        `torch/_inductor/runtime/cache_dir_utils.py`.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in environment:
        return
    temporary = Path(environment.get("TMPDIR") or tempfile.gettempdir())
    # A folder with contents cannot be removed this way. A user without a name in the system has another folder.
    with contextlib.suppress(OSError, KeyError):
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        (temporary / f"torchinductor_{user}").rmdir()
