"""The arms that the disks below `nvme_path` have room for."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trial_lib.deepspeed_config.layout import Layout
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.experiment.search_space_section import read_search_space
from trial_lib.memory.host_bytes import host_bytes
from trial_lib.records.result import Outcome, SwapDisk, TrialResult
from trial_lib.records.units import bytes_shown
from trial_lib.space.knobs import Arm, SearchSpace, get_knob
from trial_lib.space.known_knobs.offload import NVME_PATHS
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.setup import StudySetup
from trial_lib.wire.errors import InputError

RESERVE = 0.1
"""Share of the disk's free room that stays free. A full disk stops whoever writes there."""


def with_swap_disks(profiled: TrialResult, setup: StudySetup) -> TrialResult:
    """Returns the result of a profile trial with the free room of the disks to which arms may swap.

    A resumed study reads it there, so that its search has the same arms. The disks of other hosts are not known.

    Args:
        profiled: the result.
        setup: the study's.
    """
    elsewhere = setup.experiment.config.resources.hosts or setup.arguments.ray_address is not None
    if elsewhere or profiled.outcome is not Outcome.COMPLETED or profiled.program is None:
        return profiled
    base_config = KnownProgram.of(setup.experiment).learned(profiled.program).base_config
    disks: dict[int, SwapDisk] = {}
    for path in dict.fromkeys(_paths(base_config, setup)):
        # A disk that cannot be looked at leaves nothing out.
        with contextlib.suppress(OSError):
            device, free = _looked_at((setup.experiment.model_dir / path).absolute())
            others = disks[device].paths if device in disks else []
            disks[device] = SwapDisk(paths=[*others, path], free=free)
    return profiled.model_copy(update={"swap_disks": list(disks.values())})


def without_disk_room(
    space: SearchSpace,
    base_config: Mapping[str, Any],
    profiled: TrialResult,
    slots: int,
    has_run: Callable[[Arm], bool] = lambda arm: False,
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms that would fill a disk, and sentences on them.

    The space stays whole if no arm would be left.

    Args:
        space: the configurations that a study may try.
        base_config: the user's DeepSpeed configuration, as far as it is known.
        profiled: the profile trial, which has completed. It has the free room of the disks.
        slots: devices of a trial, on this host.
        has_run: whether an arm has run here. Such an arm stays.
    """

    def written(arm: Arm, disk: SwapDisk) -> float:
        assert profiled.profile is not None
        config = overwrite_deepspeed_config(base_config, arm.knobs)
        of_rank = host_bytes(config, profiled.profile, slots, accumulates=False, profiled=Layout.of(base_config))
        sizes = of_rank.optimizer_on_disk, of_rank.params_on_disk
        paths = (str(get_knob(config, path)) for path in NVME_PATHS)
        return slots * sum(size for size, path in zip(sizes, paths, strict=True) if path in disk.paths)

    kept, said = list(space.arms), []
    for disk in profiled.swap_disks:
        sizes = {arm.label: written(arm, disk) for arm in kept if not has_run(arm)}
        cannot = {label: size for label, size in sizes.items() if size > (1 - RESERVE) * disk.free}
        kept = [arm for arm in kept if arm.label not in cannot]
        if cannot:
            said.append(_not_tried(cannot, disk))
    if not said:
        return space, []
    if not kept:
        paths = " and ".join(path for disk in profiled.swap_disks for path in disk.paths)
        return space, [f"No arm seems to have room on the disk below {paths}. So all of them are tried."]
    return SearchSpace.of_arms(kept), said


def _not_tried(sizes: Mapping[str, float], disk: SwapDisk) -> str:
    shown = " and ".join(dict.fromkeys(map(bytes_shown, sorted({min(sizes.values()), max(sizes.values())}))))
    return (
        f"Not tried, because they would write {shown} below {' and '.join(disk.paths)}, whose disk had "
        f"{bytes_shown(disk.free)} free after the profile trial ({RESERVE:.0%} of it stays free): {', '.join(sizes)}."
    )


def _paths(base_config: Mapping[str, Any], setup: StudySetup) -> Iterator[str]:
    """Yields the NVMe devices that the user's configuration names, or that `search_space` does."""
    yield from (str(path) for each in NVME_PATHS if (path := get_knob(base_config, each)))
    # A wrong space is reported where the search opens.
    with contextlib.suppress(InputError):
        requests = read_search_space(setup.experiment.config.search_space)
        yield from (str(path) for request in requests if request.path in NVME_PATHS for path in request.values if path)


def _looked_at(path: Path) -> tuple[int, int]:
    """Returns the device that a folder is on, or would be on once it is made, and its free bytes.

    Raises:
        OSError: it cannot be looked at.
    """
    there = next(each for each in (path, *path.parents) if each.exists())
    return there.stat().st_dev, shutil.disk_usage(there).free
