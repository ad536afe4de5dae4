"""Folders outside a study's own that are removed even if this process has to end at once."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

leavings: list[Path] = []


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder in the temporary folder, and removes it."""
    with tempfile.TemporaryDirectory(prefix="zerotune-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        leavings.append(folder)
        try:
            yield folder
        finally:
            leavings.remove(folder)
