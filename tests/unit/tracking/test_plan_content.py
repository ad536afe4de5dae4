"""A plan as MLflow has it."""

from pathlib import Path

from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices, PlannedRange, PlanPaths, PlanRecord
from zerotune.trial_lib.tracking.run_content import plan_content


def _plan() -> PlanRecord:
    arm = PlannedArm(
        label="z2",
        knobs={"zero_optimization": {"stage": 2}},
        ds_config={"zero_optimization": {"stage": 2}},
        fits=0.97,
        largest_micro_batch=8,
        samples_per_s=PlannedRange(value=40.0, low=30.0, high=50.0),
        peak=PlannedRange(value=2.0**36, low=2.0**35, high=2.0**37),
    )
    devices = PlannedDevices(device="h100-80gb", nodes=1, per_node=8, arms=(arm,), best="z2", answer="On 8: ZeRO 2.")
    return PlanRecord(
        plan_id="p-1",
        name="llama",
        devices=(devices,),
        best=0,
        answer="On 8: ZeRO 2.",
        best_command="WANDB_API_KEY=abcdefgh deepspeed train.py\n",
        started_at=100.0,
        seconds=30.0,
    )


def test_the_run_has_the_answer_and_says_that_its_figures_are_foreseen(tmp_path: Path) -> None:
    paths = PlanPaths(tmp_path)
    paths.record.write_text("{}")
    content = plan_content(_plan(), paths)
    assert (content.record_id, content.status, content.ended_at) == ("p-1", "FINISHED", 130.0)
    assert content.tags["kind"] == "plan"
    assert content.tags["finding"] == "On 8: ZeRO 2."
    assert content.params["zero_stage"] == "2"
    metrics = {point.name: point.value for point in content.metrics}
    assert metrics["foreseen.best.samples_per_s"] == metrics["foreseen.h100-80gb 8.z2.samples_per_s"] == 40.0
    assert metrics["foreseen.best.peak_memory"] == 2.0**36
    assert content.artifacts == [paths.record]


def test_its_description_shows_no_secret(tmp_path: Path) -> None:
    description = plan_content(_plan(), PlanPaths(tmp_path)).tags["mlflow.note.content"]
    assert "deepspeed train.py" in description
    assert "abcdefgh" not in description
    assert "no device has measured them" in description
