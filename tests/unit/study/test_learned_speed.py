"""The speed of devices, learned from a study's trials: what is learned, kept, and used by the next plan and study."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.study.test_against_plan import BASE, candidate, result, state
from tests.unit.study.test_study_plan import CPU, H100, devices, opened, record
from trial_lib.messages.errors import InputError
from trial_lib.plan.devices import DeviceSpeed, Efficiencies, device_speeds, read_device_speed
from trial_lib.plan.plan_record import PlanArguments
from trial_lib.plan.step_time import foresee_step
from trial_lib.records.candidate import Purpose
from trial_lib.records.folders import StudyPaths
from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.result import Outcome
from trial_lib.study.against_plan import AgainstPlan, learned_speed, measured_steps
from trial_lib.study.foreseen_arms import cluster_here, keep_steps, kept_steps
from trial_lib.study.open_plan import open_plan, read_plan
from trial_lib.study.plan_run import _not_learned
from trial_lib.study.study_plan import speed_file, study_plan

__all__ = ["opened"]
# A device whose products of matrices get less of the data sheet than most.
TRUE = Efficiencies().changed({"matmul": -0.3})
SIZES = (2, 4, 8, 16)


@pytest.fixture
def plan(opened):
    return opened(record(devices("h100-80gb", 79.1)), H100)


def measured(plan, constants=TRUE, sizes=SIZES, **more):
    """Returns the state of a study whose devices have some constants."""
    ended = []
    for number, size in enumerate(sizes, 2):
        _, run = plan.run_of(candidate(3, size), BASE)
        speed = foresee_step(run, plan.cluster, constants).samples_per_s
        ended.append((result(number, metrics={"throughput": speed}, **more), candidate(3, size)))
    return state(*ended)


def test_the_constants_come_nearer_to_those_of_the_device(plan):
    found = learned_speed(plan.steps, "study-1", measured(plan), BASE)
    assert (found.device, found.study_id, found.steps) == ("h100-80gb", "study-1", 4)
    before, after = (abs(math.log(each.matmul.value / TRUE.matmul.value)) for each in (Efficiencies(), found.constants))
    # What nothing tells apart is shared with the constant for all that the others leave out.
    assert after < before
    _, run = plan.run_of(candidate(3, 32), BASE)
    true, learned, default = (
        foresee_step(run, plan.cluster, each).seconds for each in (TRUE, found.constants, Efficiencies())
    )
    assert abs(learned / true - 1) < 0.02 < abs(default / true - 1)


def test_only_what_was_measured_and_foreseen_teaches(plan):
    assert learned_speed(plan.steps, "s", measured(plan, outcome=Outcome.OUT_OF_MEMORY), BASE) is None
    assert learned_speed(plan.steps, "s", state((result(2), candidate(1, 4))), BASE) is None
    assert learned_speed(plan.steps, "s", measured(plan, purpose=Purpose.PROFILE), BASE) is None


def test_a_configuration_counts_once_by_its_middle_reading(plan):
    readings = [
        (result(number, metrics={"throughput": speed}), candidate(3, 4))
        for number, speed in ((2, 10.0), (3, 20.0), (4, 80.0))
    ]
    (step,) = measured_steps(plan.steps, plan.cluster, state(*readings), BASE)
    assert step.seconds == pytest.approx(4 * 8 / 20.0)
    many = measured(plan, sizes=tuple(range(1, 31)))
    assert len(measured_steps(plan.steps, plan.cluster, many, BASE)) == 12


def test_a_study_on_other_devices_learns_nothing(opened, plan):
    ended = measured(plan)
    elsewhere = opened(record(devices("h100-80gb", 79.1)), CPU)
    assert learned_speed(elsewhere.steps, "s", ended, BASE) is None


def test_a_study_without_a_plan_learns_from_its_own_foreseen_runs(plan, tmp_path):
    runs, cluster = plan.runs["z3"], cluster_here(H100, 8, 1)
    for run in (runs.small, runs.large):
        keep_steps(run, "z3", tmp_path / "foreseen_runs")
    steps = kept_steps(tmp_path / "foreseen_runs", cluster)
    assert cluster.device.name == "h100-80gb"
    by_plan = learned_speed(plan.steps, "study-1", measured(plan), BASE)
    by_itself = learned_speed(steps, "study-1", measured(plan), BASE)
    assert by_itself.efficiencies == by_plan.efficiencies
    # No speed follows from a CPU's steps, and none from an arm that was not foreseen.
    assert cluster_here(CPU, 8, 1) is None
    assert learned_speed(kept_steps(tmp_path / "foreseen_runs", None), "s", measured(plan), BASE) is None
    assert learned_speed(kept_steps(tmp_path / "none", cluster), "s", measured(plan), BASE) is None


def test_damaged_steps_are_told(plan, tmp_path):
    keep_steps(plan.runs["z3"].small, "z3", tmp_path)
    (tmp_path / "z2-mbs1.json.gz").write_bytes(b"no")
    with pytest.raises(InputError, match="foreseen run is damaged"):
        kept_steps(tmp_path, plan.cluster)


def kept(folder: Path, name: str, speed: DeviceSpeed) -> None:
    file = StudyPaths(folder / name).device_speed
    file.parent.mkdir(parents=True)
    file.write_text(speed.model_dump_json())


def test_the_latest_study_of_each_kind_counts(plan, tmp_path):
    found, studies = learned_speed(plan.steps, "b-older", measured(plan), BASE), tmp_path / "zerotune-studies"
    assert device_speeds(studies) == {}
    kept(studies, "b-older", found)
    kept(studies, "a-newer", found.model_copy(update={"study_id": "a-newer", "ended_at": found.ended_at + 9}))
    kept(studies, "c-other", found.model_copy(update={"study_id": "c-other", "device": "a100-40gb"}))
    kept(studies, "d-damaged", found.model_copy(update={"efficiencies": {"unknown": 1}}))
    (studies / "e-without").mkdir()
    assert {name: each.study_id for name, each in device_speeds(studies).items()} == {
        "h100-80gb": "a-newer",
        "a100-40gb": "c-other",
    }
    assert read_device_speed(StudyPaths(studies / "d-damaged").device_speed) is None


def test_the_next_study_with_a_plan_orders_and_compares_by_it(plan, tmp_path):
    speed = learned_speed(plan.steps, "study-1", measured(plan), BASE)
    speed_file(tmp_path).write_text(speed.model_dump_json())
    again = study_plan(tmp_path, H100, 8)
    assert speed.sentence in list(again.told())
    planned = next(each for each in plan.expected if each.label == "z3")
    learned = next(each for each in again.expected if each.label == "z3")
    _, run = plan.run_of(candidate(3, 4).model_copy(update={"gradient_accumulation_steps": 4}), BASE)
    assert learned.samples_per_s == pytest.approx(
        foresee_step(
            replace(run, ds_config=again.runs["z3"].small.ds_config), plan.cluster, speed.constants
        ).samples_per_s
    )
    assert learned.samples_per_s != planned.samples_per_s
    errors = []
    for number, each in enumerate((plan, again)):
        file = tmp_path / f"{number}.json"
        AgainstPlan(each, file).add(measured(plan), BASE)
        errors.append(abs(PlannedTrials.in_file(file).speed_error))
        assert PlannedTrials.in_file(file).measured_on == ("study-1" if number else "")
    assert errors[1] < 0.1 * errors[0]


def test_a_plan_learns_only_if_it_is_asked_to(plan, tmp_path):
    (tmp_path / "train.py").write_text("import deepspeed\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 64}))
    words = ("deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds.json")
    speed = learned_speed(plan.steps, "study-1", measured(plan), BASE)
    kept(tmp_path / "zerotune-studies", "study-1", speed)

    def speeds(on, **more):
        asked = PlanArguments(command=words, model_dir=tmp_path, on=on, **more)
        return open_plan(read_plan(asked), tmp_path, tmp_path / "scratch")

    assert speeds(("h100-80gb:8",)).speeds == {}
    both = speeds(("h100-80gb:8", "a100-40gb:8"), from_earlier=True)
    assert both.speeds == {"h100-80gb": speed}
    (note,) = _not_learned(both)
    assert note.startswith("No earlier study in this folder has foreseen its steps on a100-40gb")
    assert _not_learned(speeds(("a100-40gb:8",))) == []
