"""Noting when a rank builds an op: the time is not its trial's."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import build_times


def note_builds(scratch: Path) -> None:
    """Notes from here on when this process builds an extension of torch's, as DeepSpeed's ops are.

    Args:
        scratch: the trial's scratch folder.
    """

    def follow(module: ModuleType) -> None:
        load = module._jit_compile

        @functools.wraps(load)
        def load_and_note(*arguments: Any, **options: Any) -> Any:
            """Stands in for `torch.utils.cpp_extension._jit_compile`."""
            with build_times.noted(scratch):
                return load(*arguments, **options)

        module._jit_compile = load_and_note  # type: ignore[attr-defined]

    when_imported("torch.utils.cpp_extension", follow)
