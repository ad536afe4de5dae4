"""Writing a file whole. A rank imports this module from the user's environment: standard library only."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or nothing: to a temporary name beside it, then renamed.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the file is then as it was.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
