"""The plan that a study is asked to begin with: what shows at once is one sentence, before anything is started."""

import pytest

from tests.plan_fixtures import plan_folder
from tests.unit.study.test_study_plan import CONFIG, CPU, H100, devices, record
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.study.study_plan import read_given_plan

STAGES = (0, 1, 2, 3)


@pytest.fixture
def given(tmp_path):
    """The folder of a plan whose configuration is changed."""

    def make(**config):
        plan = record(devices("a100-40gb", 39.4), devices("h100-80gb", 79.1))
        plan = plan.model_copy(update={"ds_config": {**plan.ds_config, **config}})
        return plan_folder(tmp_path, plan).root

    return make


def test_a_plan_of_this_program_comes_with_the_nearest_devices_alone(given):
    paths, plan = read_given_plan(given(), H100, 8, CONFIG, STAGES)
    assert [each.device for each in plan.devices] == ["h100-80gb"]
    assert paths.record.is_file()
    # A plan for other devices, or another number of them, is no mistake.
    assert read_given_plan(given(), CPU, 2, CONFIG, STAGES)[1].devices


def test_another_precision_is_refused_if_the_configuration_states_it(given):
    with pytest.raises(InputError, match="parameters of 16 bits, and this configuration has 32 bits") as refused:
        read_given_plan(given(), H100, 8, {"bf16": {"enabled": False}}, STAGES)
    assert "leave --plan out" in str(refused.value)
    for undecided in ({}, {"optimizer": {"type": "AdamW"}}, {"bf16": {"enabled": "auto"}}):
        read_given_plan(given(), H100, 8, undecided, STAGES)


def test_groups_of_ranks_that_do_not_go_on_the_slots_are_refused(given):
    folder = given(tensor_parallel={"autotp_size": 4})
    read_given_plan(folder, H100, 4, CONFIG, STAGES)
    with pytest.raises(InputError, match="2 devices cannot be divided into tensor-parallel groups of 4"):
        read_given_plan(folder, H100, 2, CONFIG, STAGES)


def test_a_plan_without_a_stage_of_the_study_is_refused(given):
    folder = given()
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"stage":0', '"stage":3').replace('"stage":1', '"stage":3'))
    read_given_plan(folder, H100, 8, CONFIG, (1, 2))
    with pytest.raises(InputError, match="the plan has ZeRO 2 and 3, and the study may use 0 and 1"):
        read_given_plan(folder, H100, 8, CONFIG, (0, 1))


@pytest.mark.parametrize("content", [b"no", b""])
def test_a_damaged_run_is_found_before_the_study_has_a_folder(given, content):
    folder = given()
    (folder / "runs" / "z3-mbs1-of8.json.gz").write_bytes(content)
    with pytest.raises(InputError, match="this foreseen run is damaged or of another version"):
        read_given_plan(folder, H100, 8, CONFIG, STAGES)
