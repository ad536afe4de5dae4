"""What a study's search is about: the global batch that it keeps."""

import logging
from pathlib import Path
from typing import Any

import pytest

from trial_lib.experiment.result import ModelProfile
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.problem import kept_batch

PROFILE = ModelProfile(
    num_params=1_000,
    trainable_num_params=1_000,
    activation_mem_per_gpu=10,
    gpu_mem=10**6,
    data_parallel_size=4,
    flops_per_sample=1e6,
)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


def kept(config: dict[str, Any], **told: Any) -> int | None:
    arguments = StudyArguments(config_path=Path("a.yaml"), model_dir=Path(), **told)
    return kept_batch(arguments, config, PROFILE, logging.getLogger("test"))


def test_adaptive_keeps_the_configuration_s_global_batch() -> None:
    assert kept(CONFIG) == 2 * 3 * 4
    assert kept({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}) == 64


def test_another_global_batch_may_be_asked_for_or_none() -> None:
    assert kept(CONFIG, train_batch_size=96) == 96
    assert kept(CONFIG, free_batch=True) is None


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_the_predecessor_s_methods_let_it_grow(method: str) -> None:
    assert kept(CONFIG, method=method) is None


def test_a_batch_that_nobody_knows_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kept({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}) is None
    assert "the global batch is not kept" in caplog.text
