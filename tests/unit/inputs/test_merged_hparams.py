"""The hyperparameters of a trial: another DeepSpeed configuration, in the form that the user's code reads."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams, inline_ds_config
from zerotune.trial_lib.inputs.config import Hyperparameters
from zerotune.trial_lib.study.plans import merged_hparams, with_derived_batch

CONFIG = {"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 3}}
INLINE = {"lr": 0.1, "train_batch_size": 16, "optimizer": {"type": "Adam"}}


def merged(**hyperparameters: Any) -> dict[str, Any]:
    return merged_hparams(Hyperparameters.model_validate(hyperparameters), CONFIG, Path("/trial/ds_config.json"))


def test_a_file_is_replaced_by_the_trials_file() -> None:
    assert merged(deepspeed_config="ds_config.json", lr=0.1) == {"deepspeed_config": "/trial/ds_config.json", "lr": 0.1}


def test_overwrites_are_in_the_trials_file_and_none_is_left() -> None:
    hparams = merged(deepspeed_config="ds.json", overwrite_deepspeed_args={"train_batch_size": 1})
    assert hparams == {"deepspeed_config": "/trial/ds_config.json", "overwrite_deepspeed_args": {}}


def test_a_mapping_stays_a_mapping() -> None:
    hparams = merged(deepspeed_config={"train_batch_size": 16})
    assert get_ds_config_from_hparams(hparams) == CONFIG


def test_deepspeeds_own_keys_are_replaced_among_the_others() -> None:
    assert merged(**INLINE) == {"lr": 0.1, **CONFIG}
    assert get_ds_config_from_hparams(merged(**INLINE)) == CONFIG


@pytest.mark.parametrize(
    ("hyperparameters", "inline"),
    [
        (INLINE, {"train_batch_size": 16, "optimizer": {"type": "Adam"}}),
        ({"lr": 0.1, "optimizer": "adam"}, None),
        ({"deepspeed_config": "ds_config.json", "train_batch_size": 16}, None),
    ],
    ids=["with a batch size", "without one", "beside a file"],
)
def test_a_batch_size_among_the_hyperparameters_makes_them_a_configuration(
    hyperparameters: dict[str, Any], inline: dict[str, Any] | None
) -> None:
    assert inline_ds_config(hyperparameters) == inline


def test_the_batch_size_that_the_users_own_has_is_derived_for_their_code_to_read() -> None:
    trial = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert with_derived_batch(trial, {"train_batch_size": 16}, slots=2) == {**trial, "train_batch_size": 24}
    assert with_derived_batch(trial, {}, slots=2) == trial
    known = {**trial, "train_batch_size": 12}
    assert with_derived_batch(known, {"train_batch_size": 16}, slots=2) == known
    assert with_derived_batch({}, {"train_batch_size": 16}, slots=2) == {}
