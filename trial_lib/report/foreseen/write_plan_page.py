"""Writes the page of a plan into its folder."""

from trial_lib.foresee.memory.scaled_run import have_same_events, scaled_run
from trial_lib.foresee.plan.kept_runs import kept_runs
from trial_lib.foresee.plan.plan_record import PlannedDevices, PlanPaths, PlanRecord
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
    lines = {each.label: found for each in record.devices if (found := step_lines(paths, each)) is not None}
    write_whole(paths.report, render_plan(shown_view(record, secrets), lines))


def step_lines(paths: PlanPaths, devices: PlannedDevices) -> StepLines | None:
    """Returns the step of the chosen arm in the memory of a device and of the host; None without runs of it.

    Args:
        paths: of the plan.
        devices: one of its tables.
    """
    run = step_run(paths, devices)
    return None if run is None else (step_line(run, DEVICE), step_line(run, HOST))


def step_run(paths: PlanPaths, devices: PlannedDevices) -> ForeseenRun | None:
    """Returns the run of the chosen arm at its micro-batch, as near as its runs come; None without runs of it."""
    arm = devices.chosen
    runs = {} if arm is None else kept_runs(devices, paths, arm.label)
    if arm is None or arm.label not in runs:
        return None
    known = runs[arm.label]
    small, large = known.at_replicas(devices.count * known.small.replicas // known.small.world)
    if large is None:
        return small
    if have_same_events(small, large):
        return scaled_run(small, larger=large, micro_batch=arm.micro_batch)
    return min((small, large), key=lambda run: abs(run.micro_batch - arm.micro_batch))
