"""Noting the shared memory that a rank's program makes: the guard removes what it leaves."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import shared_segments


class NotedMemory:
    """What one rank notes.

    Args:
        scratch: the trial's scratch folder.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        when_imported("multiprocessing.shared_memory", self._follow)

    def note_held(self) -> None:
        """Notes what this process has at its end, whatever library has made it."""
        if held := shared_segments.held_by([os.getpid()]):
            shared_segments.note(self._scratch, held)

    def _follow(self, module: ModuleType) -> None:
        posix = getattr(module, "_posixshmem", None)
        if posix is not None:
            # The module's own reference alone: what else uses the extension is not to change.
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
