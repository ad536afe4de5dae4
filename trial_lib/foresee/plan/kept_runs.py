"""The foreseen runs of a plan's arms, read from its folder after the plan has ended."""

from collections.abc import Mapping
from dataclasses import replace

from trial_lib.foresee.memory.growth import Growth, growth_between
from trial_lib.foresee.plan.arm_runs import ArmRuns
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.foresee.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, read_run
from trial_lib.wire.errors import InputError
from trial_lib.wire.foreseen_run import ForeseenRun


def kept_runs(devices: PlannedDevices, paths: PlanPaths) -> dict[str, ArmRuns]:
    """Returns the runs of the arms of some devices, by the arm's label.

    An arm that was run at one size grows as another one does, as in the plan. Arms whose runs are not in the folder are
    left out.

    Args:
        devices: of the plan.
        paths: the plan's files.

    Raises:
        InputError: a run's file is damaged.
    """
    runs: dict[str, ForeseenRun] = {}
    for name in {name for arm in devices.arms for name in arm.runs}:
        if paths.run(name).is_file():
            runs[name] = _read(paths, name)
    whole = [arm for arm in devices.arms if arm.runs and all(name in runs for name in arm.runs)]
    growth = _growth(whole, runs)
    return {arm.label: _of_arm(arm, runs, growth) for arm in whole}


def _of_arm(arm: PlannedArm, runs: Mapping[str, ForeseenRun], growth: Growth | None) -> ArmRuns:
    small = runs[arm.runs[0]]
    large = runs[arm.runs[1]] if len(arm.runs) > 1 else None if growth is None else growth.of(small)
    if large is None:
        # The program has batches of one size, whatever size was asked for.
        small = replace(small, micro_batch=arm.micro_batch)
    return ArmRuns(PlanArm(arm.label, arm.knobs, arm.is_own), small, large, names=arm.runs)


def _growth(arms: list[PlannedArm], runs: Mapping[str, ForeseenRun]) -> Growth | None:
    """Returns how the first arm with runs at two sizes grows; None if all were run at one size."""
    for arm in arms:
        if len(arm.runs) > 1 and (found := growth_between(runs[arm.runs[0]], runs[arm.runs[1]])) is not None:
            return found
    return None


def _read(paths: PlanPaths, name: str) -> ForeseenRun:
    file = paths.run(name)
    try:
        return read_run(file)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        raise InputError(
            "this foreseen run is damaged or of another version.", where=str(file), remedy="Make the plan again."
        ) from None
