"""The arms that the disk below `nvme_path` has room for."""

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.layout import Layout
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.memory.host_bytes import host_bytes
from trial_lib.records.result import TrialResult
from trial_lib.records.units import bytes_shown
from trial_lib.space.knobs import Arm, SearchSpace
from trial_lib.space.known_knobs.offload import nvme_path

RESERVE = 0.1
"""Share of the disk's free room that stays free. A full disk stops whoever writes there."""


def without_disk_room(
    space: SearchSpace, base_config: Mapping[str, Any], profiled: TrialResult, slots: int
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms that would fill the disk, and a sentence on them.

    Only the disk of this host is looked at, if the trials run here. The space stays whole if no arm would be left.

    Args:
        space: the configurations that a study may try.
        base_config: the user's DeepSpeed configuration, as far as it is known.
        profiled: the profile trial, which has completed.
        slots: devices of a trial.
    """
    path = nvme_path(base_config)
    if path is None or profiled.host != platform.node():
        return space, []
    free = _free(Path(path))

    def needed(arm: Arm) -> float:
        assert profiled.profile is not None
        config = overwrite_deepspeed_config(base_config, arm.knobs)
        of_rank = host_bytes(config, profiled.profile, slots, accumulates=False, profiled=Layout.of(base_config))
        return slots * of_rank.on_disk

    too_large = {arm.label: size for arm in space.arms if (size := needed(arm)) > (1 - RESERVE) * free}
    kept = [arm for arm in space.arms if arm.label not in too_large]
    if not too_large or not kept:
        return space, []
    sizes = " and ".join(dict.fromkeys(map(bytes_shown, sorted({min(too_large.values()), max(too_large.values())}))))
    return SearchSpace.of_arms(kept), [
        f"Not tried, because they would write {sizes} below {path}, whose disk has {bytes_shown(free)} free "
        f"({RESERVE:.0%} of it stays free): {', '.join(too_large)}."
    ]


def _free(path: Path) -> float:
    """Returns the free bytes of the disk that a folder is on, or would be on once it is made."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return float(shutil.disk_usage(there).free)
