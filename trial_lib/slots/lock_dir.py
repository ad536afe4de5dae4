"""The folder of the locks of slots and ports."""

import os
from pathlib import Path


def host_lock_dir() -> Path:
    """Returns the folder of the locks. It belongs to this host and this boot, as slots and ports do."""
    return Path("/tmp") / f"zerotune-{os.getuid()}"
