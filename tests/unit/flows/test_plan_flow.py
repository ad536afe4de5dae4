"""The flow of the deployment `plan/local`: its form has the flags of the command."""

from pathlib import Path

import pytest

from zerotune.flows.options import checked
from zerotune.flows.plan import plan
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanArguments


def test_the_form_has_every_field_of_the_arguments() -> None:
    assert set(plan.parameters.properties) == {*PlanArguments.model_fields, "work_dir"}
    assert plan.name == "plan"


def test_a_run_takes_the_yamls_folder_and_all_stages() -> None:
    given = {"config_path": Path("/models/deepspeed.yaml"), "on": ("h100-80gb:8",), "zero_stages": None}
    arguments = checked(PlanArguments, given)
    assert arguments.model_dir == Path("/models")
    assert arguments.zero_stages == (0, 1, 2, 3)


def test_two_things_to_plan_are_refused() -> None:
    with pytest.raises(InputError, match="expected one of config_path, command and model"):
        checked(PlanArguments, {"config_path": Path("/a.yaml"), "command": ("python", "train.py")})
