"""What tests share that run beside each other, in several workers of pytest-xdist: each rank has a core of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def shared_folder(folder: Path) -> Path:
    """Returns a folder that all workers have in common. Without workers it is a test's own.

    Args:
        folder: of the test, below the worker's own.
    """
    return next((each.parent for each in folder.parents if each.name == f"popen-{_WORKER}"), folder)


def own_first(slots: Sequence[str]) -> list[str]:
    """Returns the slots of a host, another one first for each worker."""
    number = int(_WORKER.removeprefix("gw") or 0) % max(1, len(slots))
    return [*slots[number:], *slots[:number]]
