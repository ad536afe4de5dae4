"""Records when a rank builds an op, because that time is not the trial's."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import build_times


def note_builds(scratch: Path) -> None:
    """Records, from now on, when this process builds a torch extension. DeepSpeed's ops are such extensions.

    Args:
        scratch: the trial's scratch folder.
    """

    def follow(module: ModuleType) -> None:
        load = module._jit_compile

        @functools.wraps(load)
        def load_and_note(*arguments: Any, **options: Any) -> Any:
            """Replaces `torch.utils.cpp_extension._jit_compile`."""
            with build_times.noted(scratch):
                return load(*arguments, **options)

        module._jit_compile = load_and_note  # type: ignore[attr-defined]

    when_imported("torch.utils.cpp_extension", follow)
