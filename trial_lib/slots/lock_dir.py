"""The folder of the locks that slots and ports are held by."""

import os
from pathlib import Path


def host_lock_dir() -> Path:
    """Returns where the locks of slots and ports stand: of this host and this boot, like what they hand out."""
    return Path("/tmp") / f"zerotune-{os.getuid()}"
