"""The file of a plan that a study begins with, and its copy in the study's folder."""

import shutil
from pathlib import Path

from trial_lib.foresee.plan.kept_runs import wider_runs
from trial_lib.foresee.plan.plan_record import PlanPaths, PlanRecord
from trial_lib.foresee.time.efficiencies import DeviceSpeed
from trial_lib.study.kept.record_file import read_record_file
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import OWNERS_FILE, make_own_folder, write_whole

_WHERE = "--plan"
_REMEDY = "Name the folder of a plan in zerotune-plans, or the plan.json there."


def read_plan_file(given: Path) -> tuple[PlanPaths, PlanRecord]:
    """Returns the files and the record of a plan.

    Args:
        given: its plan.json, or its folder.

    Raises:
        InputError: there is no plan, it is damaged, or it has foreseen nothing.
    """
    paths = PlanPaths(given if given.is_dir() else given.parent)
    file = paths.record if given.is_dir() else given
    try:
        record = read_record_file(file, PlanRecord, "the plan", _REMEDY)
    except FileNotFoundError:
        said = "this folder has no plan.json." if given.is_dir() else "there is no such file."
        raise InputError(said, where=f"{_WHERE} {given}", remedy=_REMEDY) from None
    if not any(arm for devices in record.devices for arm in devices.arms if not arm.stopped):
        raise InputError(
            "this plan has foreseen no configuration, so a study cannot begin with it.",
            where=f"{_WHERE} {given}",
            remedy="Leave --plan out, or make a plan that foresees some.",
        )
    return paths, record


def speed_file(folder: Path) -> Path:
    """Returns the file beside a study's copy of its plan, with what earlier studies have measured of the devices."""
    return folder / "device_speed.json"


def keep_plan(plan: PlanPaths, record: PlanRecord, folder: Path, speed: DeviceSpeed | None = None) -> None:
    """Copies a plan into the folder of a study, which is complete without the plan's own.

    Args:
        plan: the plan's files.
        record: the plan, with the devices that the study goes by.
        folder: the copy.
        speed: what earlier studies have measured of the devices.
    """
    kept = PlanPaths(folder)
    make_own_folder(kept.runs)
    arms = [arm for devices in record.devices for arm in devices.arms]
    named = [plan.run(name) for arm in arms for name in arm.runs]
    for file in dict.fromkeys([*named, *(file for arm in arms for file in wider_runs(arm, plan))]):
        if file.is_file():
            shutil.copyfile(file, kept.runs / file.name)
            (kept.runs / file.name).chmod(OWNERS_FILE)
    if speed is not None:
        write_whole(speed_file(folder), speed.model_dump_json())
    write_whole(kept.record, record.model_dump_json(), mode=OWNERS_FILE)
