"""Records the shared memory that a rank's program makes, so that the guard can remove the rest."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import shared_segments


class NotedMemory:
    """The record of one rank.

    Args:
        scratch: the trial's scratch folder.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        when_imported("multiprocessing.shared_memory", self._follow)

    def note_held(self) -> None:
        """Records the segments that this process holds at its end, whichever library has made them."""
        if held := shared_segments.held_by([os.getpid()]):
            shared_segments.note(self._scratch, held)

    def _follow(self, module: ModuleType) -> None:
        posix = getattr(module, "_posixshmem", None)
        if posix is not None:
            # Only this module's own reference is replaced. Other users of the extension keep theirs.
            module._posixshmem = SimpleNamespace(  # type: ignore[attr-defined]
                **{**vars(posix), "shm_open": self._noting(posix.shm_open)}
            )

    def _noting(self, shm_open: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(shm_open)
        def noting(path: str, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor = shm_open(path, flags, *arguments, **options)
            if flags & os.O_CREAT:
                shared_segments.note(self._scratch, [path.lstrip("/")])
            return descriptor

        return noting
