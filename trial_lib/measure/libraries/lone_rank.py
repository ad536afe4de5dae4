"""A rank that is alone creates no buffer for exchanges with others.

On a CPU DeepSpeed writes 69 MB to shared memory when it initialises, for each rank of a host. It takes a tenth of a
second of every trial. In a world of one rank DeepSpeed exchanges nothing (deepspeed/comm/torch.py
`inference_all_reduce`), so nothing ever reads the buffer.
"""

import functools
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported


def install() -> None:
    """Makes a lone rank skip the buffer. Call it before the user's program runs."""
    when_imported("deepspeed.comm.torch", _follow)


def _follow(module: ModuleType) -> None:
    original = getattr(module, "build_shm_op", None)
    if original is None:
        return

    @functools.wraps(original)
    def build() -> Any:
        """Replaces the function that loads DeepSpeed's op."""
        op = original()
        return None if op is None else _Op(op)

    module.build_shm_op = build  # type: ignore[attr-defined]


class _Op:
    """DeepSpeed's op. Only its `initialize` differs."""

    def __init__(self, op: Any) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def initialize(self, size: int, rank: int) -> None:
        """Creates the buffer of a rank that has others beside it."""
        if size > 1:
            self._op.initialize(size, rank)
