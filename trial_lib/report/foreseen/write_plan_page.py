"""Writes the page of a plan into its folder."""

from collections.abc import Sequence

from trial_lib.foresee.memory.growth import growth_between
from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.foresee.plan.arm_runs import ArmRuns
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.foresee.plan.plan_record import PlannedArm, PlannedDevices, PlanPaths, PlanRecord, read_run
from trial_lib.report.foreseen.plan_page import StepLines, render_plan
from trial_lib.report.foreseen.step_line import DEVICE, HOST, step_line
from trial_lib.report.shown_view import shown_view
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.whole_files import write_whole


def write_plan_page(paths: PlanPaths) -> None:
    """Writes the page of a plan from its record and its runs.

    Raises:
        OSError: a file is missing, or the disk is full.
    """
    secrets = KnownSecrets.of(paths.experiment, paths.record)
    record = PlanRecord.model_validate_json(paths.record.read_text())
    pairs = [arm.runs for each in record.devices for arm in each.arms if len(arm.runs) > 1]
    lines = {each.label: found for each in record.devices if (found := step_lines(paths, each, pairs)) is not None}
    write_whole(paths.report, render_plan(shown_view(record, secrets), lines))


def step_lines(paths: PlanPaths, devices: PlannedDevices, pairs: Sequence[Sequence[str]]) -> StepLines | None:
    """Returns the step of the chosen arm in the memory of a device and of the host; None without runs of it.

    Args:
        paths: of the plan.
        devices: one of its tables.
        pairs: names of the runs of the arms that ran at two micro-batches.
    """
    arm = devices.chosen
    if arm is None or not arm.runs:
        return None
    run = step_run(paths, arm, devices.count, pairs)
    return step_line(run, DEVICE), step_line(run, HOST)


def step_run(paths: PlanPaths, arm: PlannedArm, count: int, pairs: Sequence[Sequence[str]] = ()) -> ForeseenRun:
    """Returns the run of an arm at its micro-batch on a number of devices, as near as its runs come.

    An arm that ran at one micro-batch grows as another arm does, as in the plan's table.
    """
    files = [*map(paths.run, arm.runs), *sorted(paths.runs.glob(f"{arm.label}-mbs*.json.gz"))]
    runs = [read_run(path) for path in dict.fromkeys(files)]
    here, others = runs[: len(arm.runs)], runs[len(arm.runs) :]
    known = ArmRuns(
        arm=PlanArm(arm.label, arm.knobs, arm.is_own),
        small=here[0],
        large=here[-1] if len(here) > 1 else _grown(paths, here[0], pairs),
        wider=next((run for run in others if not run.stopped and run.micro_batch == here[0].micro_batch), None),
        names=arm.runs,
    )
    small, large = known.at_replicas(count * here[0].replicas // here[0].world)
    if large is None:
        return small
    if have_same_events(small, large):
        return scaled_run(small, larger=large, micro_batch=arm.micro_batch)
    return min((small, large), key=lambda run: abs(run.micro_batch - arm.micro_batch))


def _grown(paths: PlanPaths, small: ForeseenRun, pairs: Sequence[Sequence[str]]) -> ForeseenRun | None:
    """Returns a run at a larger micro-batch by the growth of another arm; None if none is known."""
    for names in pairs:
        growth = growth_between(*(read_run(paths.run(name)) for name in (names[0], names[-1])))
        if growth is not None and growth.micro_batch != small.micro_batch:
            return growth.of(small)
    return None
