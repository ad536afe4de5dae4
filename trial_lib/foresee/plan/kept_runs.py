"""The foreseen runs of a plan's arms, read from its folder after the plan has ended."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trial_lib.command.switches import switch_key
from trial_lib.foresee.memory.growth import Growth, growth_between
from trial_lib.foresee.plan.arm_runs import ArmRuns, with_common_loading
from trial_lib.foresee.plan.arms import PlanArm, with_switches
from trial_lib.foresee.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, read_run
from trial_lib.wire.errors import InputError
from trial_lib.wire.foreseen_run import ForeseenRun


def kept_runs(devices: PlannedDevices, paths: PlanPaths, label: str = "") -> dict[str, ArmRuns]:
    """Returns the runs of the arms of some devices, by the arm's label.

    An arm that was run at one size grows as another one does, as in the plan. Arms whose runs are not in the folder are
    left out.

    Args:
        devices: of the plan.
        paths: the plan's files.
        label: of the one arm to read; empty for all.

    Raises:
        InputError: a run's file is damaged.
    """
    whole = [arm for arm in devices.arms if arm.runs and all(paths.run(name).is_file() for name in arm.runs)]
    wanted = [arm for arm in whole if label in ("", arm.label)]
    runs = {name: read_kept_run(paths.run(name)) for name in {name for arm in wanted for name in arm.runs}}
    pairs = [arm.runs for arm in whole if len(arm.runs) > 1]
    growths: dict[tuple[tuple[str, str], ...], Growth | None] = {}
    for arm in wanted:
        switches = switch_key(arm.knobs)
        if len(arm.runs) > 1 or runs[arm.runs[0]].stopped or switches in growths:
            continue
        # Other switches may keep other activations.
        alike = (other.runs[:2] for other in whole if len(other.runs) > 1 and switch_key(other.knobs) == switches)
        grown = (growth_between(*(runs.get(name) or read_kept_run(paths.run(name)) for name in pair)) for pair in alike)
        growths[switches] = next((each for each in grown if each is not None), None)
    found = (_of_arm(arm, paths, runs, growths.get(switch_key(arm.knobs)), is_of_one_size=not pairs) for arm in wanted)
    return {each.arm.label: each for each in with_common_loading(list(found))}


def wider_runs(arm: PlannedArm, paths: PlanPaths) -> list[Path]:
    """Returns the files of an arm's runs on another number of ranks, at its small micro-batch."""
    if not arm.runs:
        return []
    small = arm.runs[0].rpartition("-of")[0]
    return [file for file in sorted(paths.runs.glob(f"{small}-of*.json.gz")) if file != paths.run(arm.runs[0])]


def _of_arm(
    arm: PlannedArm, paths: PlanPaths, runs: Mapping[str, ForeseenRun], growth: Growth | None, is_of_one_size: bool
) -> ArmRuns:
    small = with_switches(runs[arm.runs[0]], arm.knobs)
    large = with_switches(runs[arm.runs[1]], arm.knobs) if len(arm.runs) > 1 else None
    if large is None and growth is not None and not small.stopped and growth.micro_batch != small.micro_batch:
        large = growth.of_another_arm(small)
    if is_of_one_size:
        # The program has batches of one size, whatever size was asked for.
        small = replace(small, micro_batch=arm.micro_batch)
    others = (read_kept_run(file) for file in wider_runs(arm, paths))
    wider = next((run for run in others if not run.stopped), None)
    return ArmRuns(PlanArm(arm.label, arm.knobs, arm.is_own, arm.switches), small, large, wider, arm.runs)


def read_kept_run(file: Path) -> ForeseenRun:
    """Returns a foreseen run from a file of a plan or a study.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return read_run(file)
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        raise InputError(
            "this foreseen run is damaged or of another version.", where=str(file), remedy="Make the plan again."
        ) from None
