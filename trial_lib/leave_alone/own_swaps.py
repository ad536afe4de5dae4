"""Where a trial's ranks swap to NVMe: into a folder of its own, whatever the configuration comes from.

DeepSpeed swaps into `zero_stage_3/` below `nvme_path`, and empties a rank's part of it first: another trial's, or that
of a training that runs.
"""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import swap_folders

_SECTIONS = ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")


def swap_into_own_folder(scratch: Path) -> None:
    """Has DeepSpeed, from here on in this process, read a folder of the trial's own in the place of `nvme_path`.

    Args:
        scratch: the trial's scratch folder.
    """

    def follow(module: ModuleType) -> None:
        for name in _SECTIONS:
            section = getattr(module, name)
            section.__init__ = _redirected(section.__init__, scratch)

    when_imported("deepspeed.runtime.zero.offload_config", follow)


def _redirected(initialize: Any, scratch: Path) -> Any:
    @functools.wraps(initialize)
    def with_own_folder(section: Any, *arguments: Any, **settings: Any) -> None:
        named = settings.get("nvme_path")
        # Anything else is for DeepSpeed to refuse.
        if settings.get("device") == "nvme" and isinstance(named, str | Path) and named != "auto":
            folder = swap_folders.own_folder(Path(named), scratch)
            swap_folders.note(scratch, folder)
            settings["nvme_path"] = folder
        initialize(section, *arguments, **settings)

    return with_own_folder
