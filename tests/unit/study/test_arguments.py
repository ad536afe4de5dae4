"""The arguments of a study: which belong to which method."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from report_fixtures import RECORDED

from zerotune.trial_lib.study.arguments import StudyArguments


def arguments(**told: Any) -> StudyArguments:
    return StudyArguments(config_path=Path("a.yaml"), model_dir=Path(), **told)


@pytest.mark.parametrize(
    ("method", "stages"),
    [("adaptive", (0, 1, 2, 3)), ("asha", (1, 2, 3)), ("binary", (1, 2, 3)), ("random", (1, 2, 3))],
)
def test_stage_0_is_adaptive_s_unless_it_is_asked_for(method: str, stages: tuple[int, ...]) -> None:
    assert arguments(method=method).zero_stages == stages
    assert arguments(method=method, zero_stages=None).zero_stages == stages
    assert arguments(method=method, zero_stages=(0, 3)).zero_stages == (0, 3)


def test_adaptive_is_the_default() -> None:
    assert arguments().method == "adaptive"


@pytest.mark.parametrize(
    "told",
    [{"train_batch_size": 64}, {"free_batch": True}, {"divisible_by": 8}, {"memory_headroom": 0.2}],
    ids=lambda told: next(iter(told)),
)
def test_the_batch_policy_is_adaptive_s_alone(told: dict[str, Any]) -> None:
    assert arguments(**told).method == "adaptive"
    flag = "--" + next(iter(told)).replace("_", "-")
    with pytest.raises(ValidationError, match=f"{flag} is for the method adaptive, not for asha"):
        arguments(method="asha", **told)


def test_a_kept_batch_and_a_free_one_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="--train-batch-size and --free-batch exclude each other"):
        arguments(train_batch_size=64, free_batch=True)


@pytest.mark.parametrize("told", [{"max_minutes": 0}, {"memory_headroom": 1.0}, {"divisible_by": 0}], ids=str)
def test_limits_that_leave_nothing_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        arguments(**told)


def test_the_record_of_a_study_is_read_as_it_was_written() -> None:
    recorded = json.loads((RECORDED / "study.json").read_text())["arguments"]
    read = StudyArguments.model_validate(recorded)
    assert read.start == "warm"
    assert StudyArguments.model_validate(read.model_dump()) == read


def test_a_study_that_began_with_an_option_that_has_gone_is_read_without_it() -> None:
    assert arguments(foresee=True) == arguments()


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        arguments(starter="cold")
