"""Makes a trial's ranks swap to NVMe into a folder of their own, wherever the configuration comes from.

DeepSpeed swaps into `zero_stage_3/` below `nvme_path`, and first empties a rank's part of it. That part may belong to
another trial, or to a training that runs.
"""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.wire import swap_folders

_SECTIONS = ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig")


def swap_into_own_folder(scratch: Path, instead: Path | None = None) -> None:
    """Makes DeepSpeed read a folder of the trial's own in place of `nvme_path`, in this process from now on.

    Args:
        scratch: the trial's scratch folder.
        instead: a folder in place of `nvme_path`, for ranks that swap nothing; the host may have no such path.
    """

    def follow(module: ModuleType) -> None:
        for name in _SECTIONS:
            section = getattr(module, name)
            section.__init__ = _redirected(section.__init__, scratch, instead)

    when_imported("deepspeed.runtime.zero.offload_config", follow)


def _redirected(initialize: Any, scratch: Path, instead: Path | None) -> Any:
    @functools.wraps(initialize)
    def with_own_folder(section: Any, *arguments: Any, **settings: Any) -> None:
        named = settings.get("nvme_path")
        # DeepSpeed itself refuses any other value.
        if settings.get("device") == "nvme" and isinstance(named, str | Path) and named != "auto":
            folder = swap_folders.own_folder(instead or Path(named), scratch)
            swap_folders.note(scratch, folder)
            settings["nvme_path"] = folder
        initialize(section, *arguments, **settings)

    return with_own_folder
