"""A flow's parameters: the fields of a record, and what becomes of the values that a run is given."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from zerotune.flows.options import checked, shows, work_folder
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.full_experiment import TrainingArguments


@shows(StudyArguments, derived=("zero_stages",))
def flow(work_dir: Path | None = None, **arguments: Any) -> dict[str, Any]:
    """Tunes.

    Args:
        work_dir: where.
        **arguments: the record's.
    """
    return arguments


def test_a_flow_has_every_field_of_its_record_and_its_own_parameters() -> None:
    parameters = inspect.signature(flow).parameters
    assert list(parameters) == [*StudyArguments.model_fields, "work_dir"]
    assert parameters["max_trials"].default == 50
    assert parameters["config_path"].default is None
    assert parameters["max_trials"].annotation == StudyArguments.__annotations__["max_trials"]


def test_the_records_descriptions_follow_the_flows_own() -> None:
    documented = inspect.getdoc(flow) or ""
    assert documented.startswith("Tunes.\n\nArgs:\n    work_dir: where.\n")
    for name in StudyArguments.model_fields:
        assert f"\n    {name}: " in documented


def test_a_run_takes_the_yamls_folder_for_the_model_directory() -> None:
    arguments = checked(StudyArguments, flow(config_path=Path("/models/deepspeed.yaml"), model_dir=None))
    assert arguments.model_dir == Path("/models")
    assert arguments == StudyArguments(config_path=Path("/models/deepspeed.yaml"), model_dir=Path("/models"))


def test_stages_that_are_not_given_are_the_methods() -> None:
    given = {"config_path": Path("/models/deepspeed.yaml"), "zero_stages": None}
    assert checked(StudyArguments, given).zero_stages == (0, 1, 2, 3)
    assert checked(StudyArguments, {**given, "method": "asha"}).zero_stages == (1, 2, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config_path": Path("deepspeed.yaml")}, "config_path: deepspeed.yaml is a relative path"),
        (
            {"config_path": Path("/m/a.yaml"), "include": (Path("/m/lib"), Path("../lib"))},
            "include: ../lib is a relative path",
        ),
        ({"model_dir": Path("/m")}, "expected either config_path or command"),
        ({}, "model_dir: Field required"),
        (
            {"config_path": Path("/m/a.yaml"), "start_profile_step": 9},
            "end_profile_step(5) comes before start_profile_step(9)",
        ),
    ],
)
def test_parameters_that_cannot_be_used_are_refused_with_a_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        checked(StudyArguments, given)
    assert said in str(refused.value)
    assert refused.value.remedy


def test_a_full_experiment_needs_its_yaml() -> None:
    with pytest.raises(InputError, match="config_path: Field required"):
        checked(TrainingArguments, {"config_path": None, "model_dir": Path("/models")})


def test_a_study_is_never_written_where_a_run_happens_to_be(tmp_path: Path) -> None:
    assert work_folder(tmp_path) == tmp_path
    with pytest.raises(InputError, match="work_dir: there is no folder to write in"):
        work_folder(None)
    with pytest.raises(InputError, match="work_dir: studies is a relative path"):
        work_folder(Path("studies"))
    with pytest.raises(InputError, match=r"work_dir: .*none is not a folder"):
        work_folder(tmp_path / "none")


def test_the_forms_metrics_are_those_that_a_search_can_optimise() -> None:
    assert StudyArguments.model_json_schema()["properties"]["metric"]["enum"] == list(SEARCH_METRICS)


@pytest.mark.parametrize("model", [StudyArguments, PlanArguments])
def test_switches_go_with_a_command_because_a_yaml_has_its_own(model: Any) -> None:
    vary = {"--twice": [True, False], "OWN": [None, "b"]}
    given = {"model_dir": Path("/models"), "vary": vary}
    assert checked(model, {**given, "command": ["deepspeed", "train.py"]}).vary == vary
    with pytest.raises(InputError, match="vary is for a command: a YAML has its switches in search_space"):
        checked(model, {**given, "config_path": Path("/models/deepspeed.yaml")})
