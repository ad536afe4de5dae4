"""The file of a plan that a study begins with: what is wrong with it is one sentence."""

import json
import math

import pytest

from tests.plan_fixtures import plan_by_hand, plan_folder
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlannedArm, PlanPaths
from zerotune.trial_lib.study.study_plan import keep_plan, read_plan_file


def test_a_plan_is_named_by_its_folder_or_by_its_file(tmp_path):
    plan_folder(tmp_path / "plan")
    paths, record = read_plan_file(tmp_path / "plan")
    assert record.plan_id.startswith("llama-8b")
    assert read_plan_file(tmp_path / "plan" / "plan.json") == (paths, record)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        ("{", r"the plan is damaged or of another version \(1 mistake\)"),
        ("", r"the plan is damaged or of another version \(1 mistake\)"),
        (json.dumps({"train_batch_size": 8}), r"the plan is damaged or of another version \(\d mistakes\)"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, content, said):
    file = tmp_path / "plan.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=said) as refused:
        read_plan_file(file)
    assert "zerotune-plans" in str(refused.value)


@pytest.mark.parametrize(
    "damage",
    [
        {"micro_batch": -3},
        {"micro_batch": 0},
        {"accumulation": 0},
        {"ds_config": {"zero_optimization": {"stage": "two"}}},
        {"knobs": {"zero_optimization": {"stage": 4}}},
        {"samples_per_s": {"value": math.nan, "low": 1.0, "high": 2.0}},
        {"fits": 7.0},
    ],
)
def test_a_plan_with_impossible_figures_is_refused(tmp_path, damage):
    record = json.loads(plan_by_hand().model_dump_json())
    record["devices"][0]["arms"][0] |= damage
    (tmp_path / "plan.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"the plan is damaged or of another version \(1 mistake\)"):
        read_plan_file(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"best": 7},
        {"best": -1},
        {"train_batch_size": 0},
        {"parameters": -1},
        {"seconds": math.inf},
        {"asks": [{"asker": "a", "question": "item", "answer": "0", "is_known": True, "count": 0}]},
    ],
)
def test_a_plan_whose_own_figures_are_impossible_is_refused(tmp_path, damage):
    record = json.loads(plan_by_hand().model_dump_json()) | damage
    (tmp_path / "plan.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"the plan is damaged or of another version \(1 mistake\)"):
        read_plan_file(tmp_path)


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no plan\.json"):
        read_plan_file(tmp_path)


def test_a_plan_that_foresaw_nothing_is_refused(tmp_path):
    record = plan_by_hand()
    stopped = (PlannedArm(label="z2", stopped="The program came to no engine."),)
    empty = record.model_copy(
        update={"devices": (record.devices[0].model_copy(update={"arms": stopped, "best": ""}),), "best": None}
    )
    plan_folder(tmp_path, empty)
    with pytest.raises(InputError, match="foreseen no configuration"):
        read_plan_file(tmp_path)


def test_the_copy_has_the_runs_of_its_devices_for_its_owner_alone(tmp_path):
    paths = plan_folder(tmp_path / "plan")
    _, record = read_plan_file(tmp_path / "plan")
    keep_plan(paths, record.model_copy(update={"devices": record.devices[1:], "best": 0}), tmp_path / "study")
    kept, copy = read_plan_file(tmp_path / "study")
    assert [each.device for each in copy.devices] == ["h100-80gb"]
    assert {file.name for file in PlanPaths(kept.root).runs.iterdir()} == {
        *("z3-mbs1-of8.json.gz", "z3-mbs2-of8.json.gz", "z3-offload-optimizer-mbs4-of8.json.gz")
    }
    assert all(file.stat().st_mode & 0o077 == 0 for file in (kept.record, *kept.runs.iterdir()))
