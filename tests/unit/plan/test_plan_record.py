"""A plan's record and its files survive the way to the disk and back."""

import stat
from pathlib import Path

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, MemoryEvent, Storage
from zerotune.trial_lib.plan.plan_record import (
    PlannedArm,
    PlannedDevices,
    PlannedRange,
    PlanPaths,
    PlanRecord,
    read_run,
    write_run,
)


def test_a_record_reads_back_as_it_was() -> None:
    arm = PlannedArm(label="z2", largest_micro_batch=4, samples_per_s=PlannedRange(value=2, low=1, high=3))
    devices = PlannedDevices(device="h100-80gb", nodes=2, per_node=8, arms=(arm,), best="z2")
    plan = PlanRecord(plan_id="p", name="n", devices=(devices,), best=0)
    again = PlanRecord.model_validate_json(plan.model_dump_json())
    assert again == plan
    assert again.chosen == arm
    assert devices.label == "h100-80gb:2x8"
    assert devices.count == 16


def test_a_run_reads_back_as_it_was_and_is_its_owners_alone(tmp_path: Path) -> None:
    run = ForeseenRun(world=8, storages=(Storage(512, 0, 0),), events=(MemoryEvent(0, 1),), modules=("", "lm_head"))
    file = PlanPaths(tmp_path / "plan").run("z2-mbs1-of8")
    write_run(file, run)
    assert read_run(file) == run
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
